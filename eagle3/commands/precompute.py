"""Runs precompute.py's valid config: the stages in their order, each alone in the folder that it writes.

A stage imports what it needs when it runs: prompts are cleaned without PyTorch, and everything else works without the
extra `prompts`.
"""

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf

from eagle3 import cli, interrupts
from eagle3.errors import InputError, Interrupted, require_packages
from eagle3.progress import Bar, duration
from eagle3.prompts import LIBRARIES
from eagle3.settings.check import check_settings
from eagle3.storage.lock import hold
from eagle3.workers.continued import Continued

if TYPE_CHECKING:
    from eagle3.prompts.growing import GrowingSource
    from eagle3.prompts.reading.rendered import TargetMarkers
    from eagle3.target.files import TargetFiles
    from eagle3.workers.task import Workers

log = logging.getLogger(__name__)


def precompute(config: DictConfig) -> None:
    """Run `config.stages`: first every check that needs no work, then the stages."""
    names = [config.stages] if isinstance(config.stages, str) else config.stages
    stages = [stage for name, stage in STAGES.items() if name in names]
    if config.prompts.from_target:
        stages = [TargetPromptsStage() if stage is STAGES["prompts"] else stage for stage in stages]
    started = time.monotonic()
    if any(stage.uses_engine for stage in stages):
        choose_engine(config, names)
    warn_of_unread(config, names, stages)
    check_ahead(config, stages)
    interrupts.raise_interrupts()
    try:
        with ExitStack() as held:
            for folder in dict.fromkeys(stage.folder(config) for stage in stages if stage.writes):
                held.enter_context(hold(folder))
            engine = held.enter_context(Continued(lambda: _answer_workers(config)))
            for stage in stages:
                stage.run(config, engine)
    except KeyboardInterrupt:
        raise Interrupted("interrupted; what was finished is kept, run the same command again to resume") from None
    log.info("%s", end_line(config, names, time.monotonic() - started))


def end_line(config: DictConfig, names: Sequence[str], seconds: float) -> str:
    """Say where the result is, how long it took, and the command that continues with it."""
    out_dir, target = config.out_dir, config.target.path or "TARGET"
    last = next((name for name in ("features", "answers", "prompts") if name in names), "estimate")
    if last == "features":
        store = config.features.path or f"{out_dir}/features"
        return f"{store}: {duration(seconds)}; next: python train.py data.path={store} hydra.run.dir=RUN"
    if last == "estimate":
        return f"{out_dir}/estimate.json: {duration(seconds)}"
    following = {
        "answers": f"python precompute.py 'stages=[features]' target.path={target} out_dir={out_dir}",
        "prompts": f"python precompute.py 'stages=[answers,features]' target.path={target} out_dir={out_dir}",
    }
    return f"{out_dir}/{last}: {duration(seconds)}; next: {following[last]}"


def _answer_workers(config: DictConfig) -> "Workers":
    from eagle3.answers.build import answer_workers

    return answer_workers(config)


class Stage:
    """One stage: the keys that it reads, what it needs, and the folder of `out_dir` that it alone writes.

    writes: None if the stage may run while other processes write to `out_dir`.
    """

    writes: str | None = None
    needs_target = False
    uses_engine = False  # answers=auto and features=auto are resolved for it

    def folder(self, config: DictConfig) -> Path:
        """Return the folder on this machine that one process at a time may write."""
        assert self.writes is not None
        return Path(config.out_dir) / self.writes

    def reads(self, config: DictConfig) -> tuple[str, ...]:
        """Return the keys, or groups of keys, that have an effect on this stage."""
        raise NotImplementedError

    def check_target(self, config: DictConfig, target: "TargetFiles") -> None:
        """Raise InputError if the stage cannot work with this target; its weights are not loaded."""

    def run(self, config: DictConfig, engine: Continued) -> None:
        """Do the work. `engine` answers, started once for all stages that use it."""
        raise NotImplementedError


class PromptsStage(Stage):
    """prompts.path → DIR/prompts."""

    writes = "prompts"

    def reads(self, config: DictConfig) -> tuple[str, ...]:
        return "prompts", "answers", *(("target", "chat") if config.target.path is not None else ())

    def run(self, config: DictConfig, engine: Continued) -> None:
        self.prepare(config, None)

    def prepare(self, config: DictConfig, growing: "GrowingSource | None") -> None:
        from eagle3.prompts.rules import GROUPS, Rules
        from eagle3.prompts.stage import prepare_prompts
        from eagle3.settings.prompts import StageSettings

        groups = {group: cli.plain(config.prompts)[group] for group in GROUPS}
        markers = self._markers(config) if config.target.path is not None else None
        rules = Rules(groups, privacy=cli.build(config.prompts.privacy), markers=markers)
        settings, keep_answers = cli.settings(StageSettings, config.prompts), config.answers.name == "imported"
        folder = Path(config.out_dir)
        prepare_prompts(settings, rules, keep_answers=keep_answers, out_dir=folder, growing=growing)

    def _markers(self, config: DictConfig) -> "TargetMarkers":
        from eagle3.answers.build import chat_of
        from eagle3.answers.markers import target_markers
        from eagle3.target.files import read_target_files

        return target_markers(chat_of(config, read_target_files(**cli.plain(config.target))))


class TargetPromptsStage(PromptsStage):
    """The target, and prompts.path if it is given → DIR/target_prompts, DIR/prompts."""

    needs_target = True
    uses_engine = True

    def reads(self, config: DictConfig) -> tuple[str, ...]:
        return "prompts", *STAGES["answers"].reads(config)

    def check_target(self, config: DictConfig, target: "TargetFiles") -> None:
        from eagle3.target_prompts.build import check_target_prompts

        check_target_prompts(config, target)

    def run(self, config: DictConfig, engine: Continued) -> None:
        from eagle3.target.stored import stored_target
        from eagle3.target_prompts.build import TargetPrompts

        self.prepare(config, TargetPrompts(config, stored_target(**cli.plain(config.target)), engine))


class EstimateStage(Stage):
    """DIR/prompts or DIR/answers → DIR/estimate.json."""

    needs_target = True

    def reads(self, config: DictConfig) -> tuple[str, ...]:
        return "estimate", "target", "chat", "answers", "sampling", "features"

    def check_target(self, config: DictConfig, target: "TargetFiles") -> None:
        from eagle3.answers.build import chat_of

        chat_of(config, target)
        check_layers(config, target)

    def run(self, config: DictConfig, engine: Continued) -> None:
        from eagle3.estimate import estimate_run

        estimate_run(config)


class AnswersStage(Stage):
    """DIR/prompts → DIR/answers."""

    writes = "answers"
    needs_target = True
    uses_engine = True

    def reads(self, config: DictConfig) -> tuple[str, ...]:
        if config.answers.name == "imported":
            return "target", "chat", "answers", "sampling.max_prompt_tokens"
        from eagle3.engine.endpoint import ENDPOINTS

        kind = ENDPOINTS.get(config.answers.name)
        servers = ("launch",) if kind and kind.started_here and not config.answers.urls else ()
        return "target", "chat", "answers", "sampling", "workers", *servers

    def check_target(self, config: DictConfig, target: "TargetFiles") -> None:
        from eagle3.answers.build import chat_of, prompt_limit
        from eagle3.engine.endpoint import ENDPOINTS

        chat_of(config, target)
        if config.answers.name != "imported":
            limits = config.sampling
            prompt_limit(target.text_config, limits.max_new_tokens, limits.max_prompt_tokens)
        if config.answers.name in ENDPOINTS:
            check_servers(config)

    def run(self, config: DictConfig, engine: Continued) -> None:
        from eagle3.answers.build import answer
        from eagle3.target.stored import stored_target

        counts = answer(config, stored_target(**cli.plain(config.target)), engine)
        engine.close()
        imported = config.answers.name == "imported"
        limit = "a length limit" if imported else f"sampling.max_new_tokens={config.sampling.max_new_tokens}"
        log.info(
            "answers: %d rows, %d answer tokens; %d answers cut at %s",
            counts.rows, counts.answer_tokens, counts.cut, limit,
        )  # fmt: skip


class FeaturesStage(Stage):
    """DIR/answers → the feature store, DIR/features unless features.path names another place."""

    writes = "features"
    needs_target = True
    uses_engine = True

    def folder(self, config: DictConfig) -> Path:
        path = config.features.path
        return super().folder(config) if path is None or "://" in path else Path(path)  # in a bucket: out_dir's

    def reads(self, config: DictConfig) -> tuple[str, ...]:
        return "target", "features", "workers", *(("launch",) if config.features.engine else ())

    def check_target(self, config: DictConfig, target: "TargetFiles") -> None:
        check_layers(config, target)
        if config.features.engine:
            check_engine(config, servers=config.features.engine.servers, captures=True)

    def run(self, config: DictConfig, engine: Continued) -> None:
        from eagle3.features.build import extract
        from eagle3.target.stored import stored_target

        engine.close()  # its servers hold the GPUs
        store = extract(config, stored_target(**cli.plain(config.target)))
        log.info(
            "features: %d samples, %d tokens, %d answer tokens, %s in %d shards; left out: %s",
            store.samples, store.tokens, store.answer_tokens, Bar.format_sizeof(store.bytes, "B"),
            len(store.shards), store.left_out or "none",
        )  # fmt: skip


# In the order in which they run; settings/precomputing.py names the same.
STAGES = {
    "prompts": PromptsStage(),
    "estimate": EstimateStage(),
    "answers": AnswersStage(),
    "features": FeaturesStage(),
}


def check_ahead(config: DictConfig, stages: Sequence[Stage]) -> None:
    """Raise InputError for what would otherwise be found only after hours of earlier stages."""
    if any(isinstance(stage, PromptsStage) for stage in stages):
        require_packages(*LIBRARIES, extra="prompts", needed_by="stages=[prompts]")
        import eagle3.prompts.stage  # noqa: F401  (a signal still ends the command at once)
    if not any(stage.needs_target for stage in stages):
        return
    from eagle3.target.stored import stored_target

    cli.quiet_libraries()
    target = stored_target(**cli.plain(config.target))
    for stage in stages:
        stage.check_target(config, target)
    if Path(target.path).is_dir():  # of the hub, they are fetched when they are needed
        target.tensors.require_files()


def check_servers(config: DictConfig) -> None:
    """Raise InputError where answers=sglang or answers=openai has no servers to ask, or cannot start any."""
    from eagle3.answers.served import require_servers
    from eagle3.head_files.files import read_without_weights
    from eagle3.settings.precomputing import ServedSettings

    settings = cli.settings(ServedSettings, config.answers)
    require_servers(settings)
    if settings.head is not None:
        read_without_weights(settings.head)
    if not settings.urls:
        check_engine(config, servers=settings.servers)


def check_engine(config: DictConfig, *, servers: int | None, captures: bool = False) -> None:
    """Raise InputError unless launch.python can start its servers on this machine; nodes of a cluster are others."""
    from eagle3.engine.versions import count_gpus, find_sglang, require_capture
    from eagle3.settings.engine import LaunchSettings

    settings = cli.settings(LaunchSettings, config.launch)
    if not settings.check or "address" in config.workers:
        return
    version = find_sglang(settings)
    count_gpus(settings, servers=servers or 1)
    if captures:
        require_capture(version)


def check_layers(config: DictConfig, target: "TargetFiles") -> None:
    from eagle3.target.capture import check_capture_layers, default_capture_layers

    num_layers = target.text_config.num_hidden_layers
    check_capture_layers(config.features.capture_layers or default_capture_layers(num_layers), num_layers)


def choose_engine(config: DictConfig, stages: Sequence[str]) -> None:
    """Replace `auto` by SGLang where it and a GPU are available or running servers are named, else by Hugging Face; log
    it for `stages` that run."""
    if config.answers.name == "auto":
        if config.answers.urls or sglang_can(config, "answers", stages):
            config.answers.name = "sglang"
        else:
            config.answers = huggingface_instead_of(config.answers)
            check_settings(config, "precompute")
    engine = config.features.engine
    if engine is not None and not engine.required and not sglang_can(config, "features", stages):
        config.features.engine = None


def huggingface_instead_of(auto: DictConfig) -> DictConfig:
    """Return the option answers/huggingface, of the user's own --config-dir if it has one; a warning names the values
    given for `auto` that it does not take."""
    files = (Path(folder) / "answers" / "huggingface.yaml" for folder in (*cli.own_config_dirs(), cli.CONF))
    chosen, usual = OmegaConf.load(next(filter(Path.is_file, files))), OmegaConf.load(f"{cli.CONF}/answers/sglang.yaml")
    assert isinstance(chosen, DictConfig) and isinstance(usual, DictConfig)
    for key in auto:
        if key not in chosen and auto[key] != usual.get(key):
            log.warning(
                "answers.%s=%s has no effect: answers=auto chose Hugging Face; leave it out, or give answers=sglang",
                key, auto[key],
            )  # fmt: skip
    return chosen


def sglang_can(config: DictConfig, what: str, stages: Sequence[str]) -> bool:
    """Return whether launch.python has a GPU and an SGLang that makes `what`: answers or features."""
    from eagle3.engine.versions import count_gpus, find_sglang, require_capture
    from eagle3.settings.engine import LaunchSettings

    settings = cli.settings(LaunchSettings, config.launch)
    tell = log.info if what in stages else log.debug
    try:
        version = find_sglang(settings)
        count_gpus(settings)
        if what == "features":
            require_capture(version)
    except InputError as obstacle:
        tell("%s by Hugging Face in this process: %s", what, obstacle)
        return False
    tell("%s by SGLang, which %s has, and a GPU", what, settings.interpreter)
    return True


def warn_of_unread(config: DictConfig, names: Sequence[str], stages: Sequence[Stage]) -> None:
    """Warn of each key on the command line that none of the stages reads."""
    read = ("stages", "out_dir", "log", "progress", *(key for stage in stages for key in stage.reads(config)))
    imported = " with answers=imported" if config.answers.name == "imported" else ""
    for key in cli.given_keys():
        if not any(f"{key}.".startswith(f"{each}.") or each.startswith(f"{key}.") for each in read):
            log.warning("%s has no effect on stages=[%s]%s; leave it out", key, ",".join(names), imported)
