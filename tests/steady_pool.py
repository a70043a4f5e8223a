"""A pool of workers that never fails."""

from collections import deque
from collections.abc import Iterator, Sequence

from eagle3.workers.driver import Lost
from eagle3.workers.task import Keyed
from eagle3.workers.worker_thread import Report


class SteadyPool:
    """Two workers that finish one item per report; if `slow`, the second reports only every third time."""

    def __init__(self, slow: bool) -> None:
        self.held = {name: deque[Keyed]() for name in ("one", "other")}
        self.slow, self.turn = slow, 0

    def new_workers(self) -> list[str]:
        return [*self.held] if self.turn == 0 else []

    def send(self, worker: str, items: Sequence[Keyed]) -> None:
        self.held[worker].extend(items)

    def reports(self) -> Iterator[tuple[str, Report | Lost]]:
        self.turn += 1
        for worker, held in self.held.items():
            if not (self.slow and worker == "other" and self.turn % 3):
                results = [held.popleft()] if held else []
                yield worker, Report(host="here", ready=True, results=results, ended=len(results))

    def stop(self, worker: str) -> None:
        raise AssertionError("nothing is wrong")

    def shutdown(self) -> None:
        pass
