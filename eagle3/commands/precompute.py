"""Runs precompute.py: the stages in their order, each alone in the folder that it writes.

A stage imports what it needs when it runs: prompts are cleaned without PyTorch, and everything else works without the
extra `prompts`.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from eagle3 import interrupts
from eagle3.errors import InputError, Interrupted, require_packages
from eagle3.home import pasted
from eagle3.hydra_run import CONF, given_keys
from eagle3.progress import Bar, duration
from eagle3.prompts import LIBRARIES
from eagle3.settings.check import checked_run
from eagle3.settings.engine import LaunchSettings
from eagle3.settings.parts import Part, plain
from eagle3.settings.precomputing import CaptureRun, PrecomputeRun, StoreSettings
from eagle3.storage.lock import hold
from eagle3.workers.continued import Continued

if TYPE_CHECKING:
    from eagle3.prompts.reading.rendered import TargetMarkers
    from eagle3.prompts.stage import GrowingSource
    from eagle3.target.files import TargetFiles
    from eagle3.target.stored import StoredTarget
    from eagle3.workers.task import Workers

log = logging.getLogger(__name__)


def precompute(run: PrecomputeRun) -> None:
    """Run `run.stages`: first every check that needs no work, then the stages."""
    stages = [stage for name, stage in STAGES.items() if name in run.stages]
    if run.prompts.from_target:
        stages = [TargetPromptsStage() if stage is STAGES["prompts"] else stage for stage in stages]
    started = time.monotonic()
    if any(stage.uses_engine for stage in stages):
        run = choose_engine(run)
    warn_of_unread(run, stages)
    run = check_ahead(run, stages)
    interrupts.raise_interrupts()
    try:
        with ExitStack() as held:
            for folder in dict.fromkeys(stage.folder(run) for stage in stages if stage.writes):
                held.enter_context(hold(folder))
            engine = held.enter_context(Continued(lambda: _answer_workers(run)))
            for stage in stages:
                stage.run(run, engine)
    except KeyboardInterrupt:
        raise Interrupted("interrupted; what was finished is kept, run the same command again to resume") from None
    log.info("%s", end_line(run, time.monotonic() - started))


def end_line(run: PrecomputeRun, seconds: float) -> str:
    """Say where the result is, how long it took, and the command that continues with it."""
    out_dir = run.out_dir
    last = next((name for name in ("features", "answers", "prompts") if name in run.stages), "estimate")
    if last == "features":
        store = run.features.path or f"{out_dir}/features"
        return f"{store}: {duration(seconds)}; next: python train.py data.path={pasted(store)} hydra.run.dir=RUN"
    if last == "estimate":
        return f"{out_dir}/estimate.json: {duration(seconds)}"
    target, out = pasted(run.target.path or "TARGET"), pasted(out_dir)
    command = f"python precompute.py 'stages=[answers,features]' target.path={target} out_dir={out}"
    if last == "answers":
        command = f"python precompute.py 'stages=[features]' target.path={target} out_dir={out}"
    return f"{out_dir}/{last}: {duration(seconds)}; next: {command}"


def _answer_workers(run: PrecomputeRun) -> "Workers":
    from eagle3.answers.build import answer_workers

    return answer_workers(run)


class Stage:
    """One stage: the keys that it reads, what it needs, and the folder of `out_dir` that it alone writes.

    writes: None if the stage may run while other processes write to `out_dir`.
    """

    writes: str | None = None
    needs_target = False
    uses_engine = False  # answers=auto and features=auto are resolved for it

    def folder(self, run: PrecomputeRun) -> Path:
        """Return the folder on this machine that one process at a time may write."""
        assert self.writes is not None
        return run.folder / self.writes

    def reads(self, run: PrecomputeRun) -> tuple[str, ...]:
        """Return the keys, or groups of keys, that have an effect on this stage."""
        raise NotImplementedError

    def check_target(self, run: PrecomputeRun, target: "TargetFiles") -> None:
        """Raise InputError if the stage cannot work with this target; its weights are not loaded."""

    def run(self, run: PrecomputeRun, engine: Continued) -> None:
        """Do the work. `engine` answers, started once for all stages that use it."""
        raise NotImplementedError


class PromptsStage(Stage):
    """prompts.path → DIR/prompts."""

    writes = "prompts"

    def reads(self, run: PrecomputeRun) -> tuple[str, ...]:
        return "prompts", "answers", *(("target", "chat") if run.target.path is not None else ())

    def run(self, run: PrecomputeRun, engine: Continued) -> None:
        self.prepare(run, None)

    def prepare(self, run: PrecomputeRun, growing: "GrowingSource | None") -> None:
        from eagle3.prompts.rules import Rules
        from eagle3.prompts.stage import prepare_prompts

        markers = self._markers(run) if run.target.path is not None else None
        rules = Rules(run.prompts, privacy=run.prompts.privacy.build(), markers=markers)
        keep_answers = run.answered_by == "imported"
        prepare_prompts(run.prompts, rules, keep_answers=keep_answers, out_dir=run.folder, growing=growing)

    def _markers(self, run: PrecomputeRun) -> "TargetMarkers":
        from eagle3.answers.build import build_chat, target_markers
        from eagle3.target.files import read_target_files

        return target_markers(build_chat(run.chat, read_target_files(**vars(run.target))))


class TargetPromptsStage(PromptsStage):
    """The target, and prompts.path if it is given → DIR/target_prompts, DIR/prompts."""

    needs_target = True
    uses_engine = True

    def reads(self, run: PrecomputeRun) -> tuple[str, ...]:
        return "prompts", *STAGES["answers"].reads(run)

    def check_target(self, run: PrecomputeRun, target: "TargetFiles") -> None:
        from eagle3.target_prompts.build import check_target_prompts

        check_target_prompts(run, target)
        if run.answered_by == "huggingface":
            check_loadable(run, target)

    def run(self, run: PrecomputeRun, engine: Continued) -> None:
        from eagle3.target_prompts.build import TargetPrompts

        self.prepare(run, TargetPrompts(run, read_target(run), engine))


class EstimateStage(Stage):
    """DIR/prompts or DIR/answers → DIR/estimate.json."""

    needs_target = True

    def reads(self, run: PrecomputeRun) -> tuple[str, ...]:
        return "estimate", "target", "chat", "answers", "sampling", "features"

    def check_target(self, run: PrecomputeRun, target: "TargetFiles") -> None:
        from eagle3.answers.build import build_chat

        build_chat(run.chat, target)
        check_layers(run, target)

    def run(self, run: PrecomputeRun, engine: Continued) -> None:
        from eagle3.estimate import estimate_run

        estimate_run(run)


class AnswersStage(Stage):
    """DIR/prompts → DIR/answers."""

    writes = "answers"
    needs_target = True
    uses_engine = True

    def reads(self, run: PrecomputeRun) -> tuple[str, ...]:
        if run.answered_by == "imported":
            return "target", "chat", "answers", "sampling.max_prompt_tokens"
        from eagle3.engine.endpoint import ENDPOINTS

        kind = ENDPOINTS.get(run.answered_by)
        servers = ("launch",) if kind and kind.started_here and not run.answers.keys["urls"] else ()
        return "target", "chat", "answers", "sampling", "workers", *servers

    def check_target(self, run: PrecomputeRun, target: "TargetFiles") -> None:
        from eagle3.answers.build import build_chat, prompt_limit
        from eagle3.engine.endpoint import ENDPOINTS

        build_chat(run.chat, target)
        if run.answered_by != "imported":
            limits = run.sampling
            prompt_limit(target.text_config, limits.max_new_tokens, limits.max_prompt_tokens)
        if run.answered_by in ENDPOINTS:
            check_servers(run)
        elif run.answered_by == "huggingface":
            check_loadable(run, target)

    def run(self, run: PrecomputeRun, engine: Continued) -> None:
        from eagle3.answers.build import answer
        from eagle3.target_prompts.answered import answers_made

        target = read_target(run)
        counts = answer(run, target, engine, as_item=answers_made(run, target))
        engine.close()
        imported = run.answered_by == "imported"
        limit = "a length limit" if imported else f"sampling.max_new_tokens={run.sampling.max_new_tokens}"
        log.info(
            "answers: %d rows, %d answer tokens; %d answers cut at %s",
            counts.rows, counts.answer_tokens, counts.cut, limit,
        )  # fmt: skip


class FeaturesStage(Stage):
    """DIR/answers → the feature store, DIR/features unless features.path names another place."""

    writes = "features"
    needs_target = True
    uses_engine = True

    def folder(self, run: PrecomputeRun) -> Path:
        path = run.features.path
        return super().folder(run) if path is None or "://" in path else Path(path)  # in a bucket: out_dir's

    def reads(self, run: PrecomputeRun) -> tuple[str, ...]:
        return "target", "features", "workers", *(("launch",) if run.features.engine else ())

    def check_target(self, run: PrecomputeRun, target: "TargetFiles") -> None:
        check_layers(run, target)
        if run.features.engine:
            check_engine(run, servers=run.features.engine.servers, captures=True)
        else:
            check_loadable(run, target)

    def run(self, run: PrecomputeRun, engine: Continued) -> None:
        from eagle3.features.build import extract

        engine.close()  # its servers hold the GPUs
        store = extract(run, read_target(run))
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


def check_ahead(run: PrecomputeRun, stages: Sequence[Stage]) -> PrecomputeRun:
    """Raise InputError for what would otherwise be found only after hours of earlier stages; return the run with the
    commit of a hub target, for all stages and workers."""
    if any(isinstance(stage, PromptsStage) for stage in stages):
        require_packages(*LIBRARIES, extra="prompts", needed_by="stages=[prompts]")
        import eagle3.prompts.stage  # noqa: F401  (a signal still ends the command at once)
    if not any(stage.needs_target for stage in stages):
        return run
    from eagle3.adapters.quiet import quiet_libraries

    quiet_libraries()
    target = read_target(run)
    for stage in stages:
        stage.check_target(run, target)
    if target.revision is None or any(stage.writes for stage in stages):  # an estimate fetches no weights
        target.require_weights()
    return replace(run, target=replace(run.target, revision=target.revision))


def read_target(run: CaptureRun) -> "StoredTarget":
    from eagle3.target.stored import stored_target

    return stored_target(**vars(run.target))


def check_servers(run: PrecomputeRun) -> None:
    """Raise InputError where answers=sglang or answers=openai has no servers to ask, or cannot start any."""
    from eagle3.answers.served import require_servers
    from eagle3.head_files.files import read_without_weights
    from eagle3.settings.precomputing import ServedSettings

    settings = run.answers.read(ServedSettings)
    require_servers(settings)
    if settings.head is not None:
        read_without_weights(settings.head)
    if not settings.urls:
        check_engine(run, servers=settings.servers)


def check_engine(run: CaptureRun, *, servers: int | None, captures: bool = False) -> None:
    """Raise InputError unless launch.python can start its servers on this machine; nodes of a cluster are others."""
    if run.launch.check and "address" not in run.workers.keys:
        require_engine(run.launch, servers=servers or 1, captures=captures)


def require_engine(launch: LaunchSettings, *, servers: int, captures: bool) -> None:
    """Raise InputError unless launch.python has an SGLang, with the capture of features if asked for, and the GPUs."""
    from eagle3.engine.versions import count_gpus, find_sglang, require_capture

    version = find_sglang(launch)
    count_gpus(launch, servers=servers)
    if captures:
        require_capture(version)


def check_loadable(run: CaptureRun, target: "TargetFiles") -> None:
    """Raise InputError where transformers lacks what a quantised target needs; nodes of a cluster are others."""
    from eagle3.target.model import require_loadable

    if "address" not in run.workers.keys:
        require_loadable(target, device=run.target.device)


def check_layers(run: CaptureRun, target: "TargetFiles") -> None:
    from eagle3.target.capture import check_capture_layers, default_capture_layers
    from eagle3.target.facts import layer_count

    num_layers = layer_count(target.text_config)
    check_capture_layers(run.features.capture_layers or default_capture_layers(num_layers), num_layers)


def choose_engine(run: PrecomputeRun) -> PrecomputeRun:
    """Replace `auto` by SGLang where it and a GPU are available or running servers are named, else by Hugging Face; log
    it for the stages that run."""
    if run.answered_by == "auto":
        if run.answers.keys["urls"] or sglang_can(run.launch, "answers", tell=_teller(run, "answers")):
            run = replace(run, answers=run.answers.with_keys(name="sglang"))
        else:
            run = checked_run(plain(run) | {"answers": huggingface_option(run.answers)}, "precompute")
    return replace(run, features=choose_features_engine(run, tell=_teller(run, "features")))


def _teller(run: PrecomputeRun, stage: str) -> Callable[..., None]:
    return log.info if stage in run.stages else log.debug


def choose_features_engine(run: CaptureRun, *, tell: Callable[..., None]) -> StoreSettings:
    """Return features=auto as what this machine has, all else as it is."""
    engine = run.features.engine
    if engine is None or engine.required or sglang_can(run.launch, "features", tell=tell):
        return run.features
    return replace(run.features, engine=None)


def huggingface_option(auto: Part) -> dict[str, Any]:
    """Return the option answers/huggingface; a warning names the values given for `auto` that it does not take."""
    chosen, usual = (
        OmegaConf.to_container(OmegaConf.load(Path(CONF, "answers", f"{name}.yaml")))
        for name in ("huggingface", "sglang")
    )
    assert isinstance(chosen, dict) and isinstance(usual, dict)
    for key, value in auto.keys.items():
        if key not in chosen and value != usual.get(key):
            log.warning(
                "answers.%s=%s has no effect: answers=auto chose Hugging Face; leave it out, or give answers=sglang",
                key, value,
            )  # fmt: skip
    return chosen  # type: ignore[return-value]


def sglang_can(launch: LaunchSettings, what: str, *, tell: Callable[..., None]) -> bool:
    """Return whether launch.python has a GPU and an SGLang that makes `what`: answers or features."""
    try:
        require_engine(launch, servers=1, captures=what == "features")
    except InputError as obstacle:
        tell("%s by Hugging Face in this process: %s", what, obstacle)
        return False
    tell("%s by SGLang, which %s has, and a GPU", what, launch.interpreter)
    return True


def warn_of_unread(run: PrecomputeRun, stages: Sequence[Stage]) -> None:
    """Warn of each key on the command line that none of the stages reads."""
    read = ("stages", "out_dir", "log", "progress", *(key for stage in stages for key in stage.reads(run)))
    imported = " with answers=imported" if run.answered_by == "imported" else ""
    for key in given_keys():
        if not any(f"{key}.".startswith(f"{each}.") or each.startswith(f"{key}.") for each in read):
            log.warning("%s has no effect on stages=[%s]%s; leave it out", key, ",".join(run.stages), imported)
