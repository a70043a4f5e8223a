"""Raw conversations → clean prompts → the target's answers → feature shards, in DIR/prompts, /responses, /features.

python precompute.py target.path=TARGET prompts.path=FILE.jsonl out_dir=DIR prompts/privacy=patterns \
    prompts.license=in-house 'prompts.licenses.allowed_terms=[in-house]'             # a laptop
python precompute.py target=llama31_8b prompts.path=FILE.jsonl out_dir=DIR prompts.license=MIT \
    prompts/privacy/model=onnx prompts.privacy.model.path=FOLDER                     # one GPU, names filtered too
python precompute.py target.path=TARGET out_dir=DIR 'stages=[features]'              # one stage, from what DIR holds
python precompute.py target=llama31_8b out_dir=DIR 'stages=[estimate]'              # tokens, bytes, GPU-hours ahead
python precompute.py out_dir=DIR 'stages=[verify]'                                   # which shards are damaged
python precompute.py target.path=TARGET out_dir=DIR 'stages=[repair]'                # those shards anew, and no others
"""

import logging
from contextlib import ExitStack
from pathlib import Path

import hydra
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from eagle3 import cli
from eagle3.errors import InputError, Interrupted, require_packages
from eagle3.prompts import LIBRARIES
from eagle3.settings.check import check_settings
from eagle3.storage.lock import hold

log = logging.getLogger(__name__)
FOLDERS = {"verify": "features", "repair": "features"}
CHECKS = set(FOLDERS)
READ_ONLY = {"estimate"}  # may look at what another process is writing
OF_TARGET = {"responses", "features", "estimate"}


@hydra.main(version_base="1.3", config_path="conf", config_name="precompute")
@cli.report_errors
def main(config: DictConfig) -> None:
    check_settings(config, "precompute")
    stages = [config.stages] if isinstance(config.stages, str) else list(config.stages)
    if "repair" in stages:
        stages.append("features")  # which makes what is not there
    if {"responses", "features"} & set(stages):
        choose_engine(config)
    warn_of_unread(config, stages)
    if "prompts" in stages:
        require_packages(*LIBRARIES, extra="prompts", needed_by="stages=[prompts]")
    try:
        run_stages(config, stages)
    except KeyboardInterrupt:
        raise Interrupted("interrupted; what was finished is kept, run the same command again to go on") from None


def run_stages(config: DictConfig, stages: list[str]) -> None:
    """Run the stages one after the other; each locks its folder."""
    out_dir = Path(config.out_dir)
    if OF_TARGET & set(stages):
        check_ahead(config, stages)
    with ExitStack() as held:
        for folder in dict.fromkeys(FOLDERS.get(stage, stage) for stage in stages if stage not in READ_ONLY):
            held.enter_context(hold(out_dir / folder))
        if CHECKS & set(stages):
            check_features(config, out_dir, repair="repair" in stages)
        if "prompts" in stages:
            clean_prompts(config.prompts, out_dir, keep_answers=config.answers.name == "imported")
        if "estimate" in stages:
            from eagle3.estimate import estimate_run

            estimate_run(config)
        if {"responses", "features"} & set(stages):
            answer_and_extract(config, stages)


def choose_engine(config: DictConfig) -> None:
    """Replace `auto` by what is possible here."""
    auto = config.answers.name == "auto", config.features.engine is not None and not config.features.engine.required
    if not any(auto):
        return
    from eagle3.engine.command import LaunchSettings
    from eagle3.engine.installation import find_sglang, require_devices

    settings = LaunchSettings(**cli.plain(config.launch))
    try:
        require_devices(find_sglang(settings), settings)
    except InputError as missing:
        log.info("answers and features by Hugging Face in this process: %s", missing)
        if auto[0]:
            config.answers = OmegaConf.load(Path(cli.CONF) / "answers/huggingface.yaml")
        if auto[1]:
            config.features.engine = None
    else:
        log.info("answers and features by SGLang, which %s has, and a GPU", settings.interpreter)
        if auto[0]:
            config.answers.name = "sglang"


def warn_of_unread(config: DictConfig, stages: list[str]) -> None:
    imported = config.answers.name == "imported"
    own = ("launch",) if config.answers.name == "sglang" and not config.answers.urls else ()
    capturing = ("launch",) if config.features.engine else ()
    read_by = {
        "prompts": ("prompts", "answers"),
        "responses": (
            ("target", "chat", "answers", "responses.max_prompt_tokens")
            if imported
            else ("target", "chat", "answers", "responses", "workers", *own)
        ),
        "features": ("target", "features", "workers", *capturing),
        "estimate": ("estimate", "target", "chat", "answers", "responses", "features"),
        "verify": ("features.path",),
        "repair": ("target", "features"),
    }
    read = ("stages", "out_dir", *(key for stage in stages for key in read_by[stage]))
    by = f"stages=[{','.join(stages)}]"
    cli.warn_of_unread(read, by=f"{by} with answers=imported" if imported else by, instead={})


def check_ahead(config: DictConfig, stages: list[str]) -> None:
    """What would be found only after hours of earlier stages."""
    from eagle3.answers.stage import prompt_limit  # prompts alone start without torch
    from eagle3.target.capture import check_capture_layers, default_capture_layers
    from eagle3.target.facts import context_of
    from eagle3.target.files import read_target_files
    from eagle3.target.sglang import capture_obstacle

    cli.quiet_libraries()
    settings = cli.plain(config.target)
    target = read_target_files(**{key: settings[key] for key in ("path", "revision", "trust_remote_code")})
    if obstacle := capture_obstacle(target.architecture):
        log.warning("target.path=%s: %s", target.path, obstacle)
    if "responses" in stages and config.answers.name != "imported":
        prompt_limit(
            context_of(target.text_config), config.responses.max_new_tokens, config.responses.max_prompt_tokens
        )
    if {"features", "estimate"} & set(stages):
        num_layers = target.text_config.num_hidden_layers
        check_capture_layers(config.features.capture_layers or default_capture_layers(num_layers), num_layers)


def check_features(config: DictConfig, out_dir: Path, *, repair: bool) -> None:
    """Say of each damaged file what is wrong, and end with an error, or take it away for the features stage."""
    from eagle3.features.repair import find_damage, take_away
    from eagle3.storage.place import open_folder

    storage = open_folder(config.features.path or out_dir / "features", setting="features.path")
    damage, foreign = find_damage(storage)
    for name, wrong in damage.items():
        log.warning("%s/%s %s", storage.location, name, wrong)
    for name in foreign:
        log.warning("%s/%s is in no manifest: of another store, or of a run that has not ended", storage.location, name)
    if repair:
        take_away(storage, damage)
    elif damage:
        raise InputError(
            f"{storage.location}: {len(damage)} files are damaged or missing (see above); make exactly those anew "
            f"with: python precompute.py target.path=TARGET out_dir={out_dir} 'stages=[repair]'"
        )
    else:
        log.info("%s is whole", storage.location)


def clean_prompts(config: DictConfig, out_dir: Path, *, keep_answers: bool) -> None:
    from eagle3.prompts.rules import GROUPS, Rules  # with the libraries of an extra, which other stages do without
    from eagle3.prompts.stage import prepare_prompts

    settings = cli.plain(config)
    rules = Rules({group: settings.pop(group) for group in GROUPS}, privacy=cli.build(config.privacy))
    prepare_prompts(rules=rules, keep_answers=keep_answers, out_dir=out_dir, **settings)


def answer_and_extract(config: DictConfig, stages: list[str]) -> None:
    from eagle3.answers.build import answer
    from eagle3.features.build import extract
    from eagle3.target.stored import stored_target

    target = stored_target(**cli.plain(config.target))
    if "responses" in stages:
        counts = answer(config, target)
        log.info("responses: %d rows, %d answer tokens", counts.rows, counts.answer_tokens)
    if "features" in stages:
        store = extract(config, target)
        log.info(
            "features: %d samples, %d tokens, %d answer tokens, %s in %d shards; left out: %s",
            store.samples, store.tokens, store.answer_tokens, tqdm.format_sizeof(store.bytes, "B"),
            len(store.shards), store.left_out or "none",
        )  # fmt: skip


if __name__ == "__main__":
    cli.start(main)
