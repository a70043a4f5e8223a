"""Times a draft setting, or the plain target, on a real server under the user's load."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from eagle3.draft_shape import Shape
from eagle3.engine.command import launch_command
from eagle3.engine.draft import SKIP_EXTEND, Draft, require_adaptive, write_adaptive
from eagle3.engine.endpoint import is_reachable, server_information
from eagle3.engine.process import Server
from eagle3.errors import InputError
from eagle3.serving.bench.stats import Summary, summarise
from eagle3.serving.check.turns import Turn
from eagle3.serving.server.load import PlainAnswers
from eagle3.settings.serving import TuneRun
from eagle3.target.files import TargetFiles


@dataclass(frozen=True, kw_only=True)
class ServerTimer:
    """Starts a server, sends it each load, and stops it. Results are by the number of concurrent requests."""

    run: TuneRun
    target: TargetFiles
    conversations: Sequence[Turn]
    plain_answers: PlainAnswers
    log_dir: Path

    def command(self, draft: Draft | None) -> list[str]:
        return launch_command(self.run.launch, target=self.target.path, revision=self.target.revision, draft=draft)

    def __call__(self, setting: Shape | None) -> dict[int, Summary]:
        """Time a draft setting (None: the plain target) at each load."""
        name = "-".join(map(str, setting)) if setting else "plain"
        draft = self._draft(setting) if setting else None
        return self._times(name, draft, self.run.tune.all_loads)

    def adaptive(self, steps: Mapping[int, int], loads: Sequence[int]) -> dict[int, Summary]:
        """Time chains with `steps` by the number of running requests, 0 at some, as the command of the report serves
        them."""
        file = self.log_dir / "timed_adaptive.json"
        write_adaptive(file, steps)
        launch = replace(self.run.launch, env=SKIP_EXTEND | (self.run.launch.env or {}))
        timer = replace(self, run=replace(self.run, launch=launch))
        return timer._times("adaptive", replace(self._draft(Shape(1, 1, 2)), adaptive=str(file)), loads)

    def _draft(self, shape: Shape) -> Draft:
        return Draft(head=self.run.head, window=self.run.tune.draft_window, **shape._asdict())

    def _times(self, name: str, draft: Draft | None, loads: Sequence[int]) -> dict[int, Summary]:
        log = self.log_dir / f"{name}.log"
        with Server(self.run.launch, self.command(draft), log=log, name=f"server {name}") as server:
            if draft is not None and draft.adaptive is not None:
                require_adaptive(server_information(server.url), name=server.name)
            return {load: self._timed(server, load, plain=draft is None) for load in loads}

    def _timed(self, server: Server, concurrency: int, *, plain: bool) -> Summary:
        progress = f"time {server.name} x{concurrency}"
        result = self.plain_answers.measure(
            server.url, self.conversations, concurrency, self.run.tune, plain=plain, progress=progress
        )
        if result.failed and not is_reachable(server.url):
            raise server.failure()
        timing = summarise([result])
        if timing.tpot is None:
            reason = ", ".join(timing.errors) or "all answers are one token long"
            raise InputError(f"none of {timing.requests} answers can be timed: {reason}")
        if not plain and timing.accept_length is None:
            raise InputError(f"{server.name} counted no verification, so it did not draft; see its log {server.log}")
        return timing
