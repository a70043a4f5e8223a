"""Times a draft setting, or the plain target, on a real server under the user's load."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eagle3.draft_shape import Shape
from eagle3.engine.command import Draft, launch_command
from eagle3.engine.endpoint import is_reachable
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
        return launch_command(self.run.launch, self.target, draft)

    def __call__(self, setting: Shape | None) -> dict[int, Summary]:
        """Time a draft setting (None: the plain target) at each load."""
        name = "-".join(map(str, setting)) if setting else "plain"
        window = self.run.tune.draft_window
        draft = Draft(head=self.run.head, draft_window=window, **setting._asdict()) if setting else None
        log = self.log_dir / f"{name}.log"
        with Server(self.run.launch, self.command(draft), log=log, name=f"server {name}") as server:
            return {load: self._timed(server, load, plain=draft is None) for load in self.run.tune.all_loads}

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
