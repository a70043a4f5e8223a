"""Tasks for tests of workers."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from eagle3.errors import InputError
from eagle3.workers.meter import Progress
from eagle3.workers.task import Keyed, Take, Task, WorkerId


@dataclass(frozen=True)
class Squares:
    """Squares numbers. `refused`: workers that cannot start; `broken`: an item that no worker can do."""

    refused: frozenset[int] = field(default_factory=frozenset)
    broken: int | None = None
    seconds: float = 0.0

    def __call__(self, worker: WorkerId) -> AbstractContextManager[Task]:
        if worker.number in self.refused:
            raise InputError("there is no target here")
        return nullcontext(self._square)

    def _square(self, take: Take[Keyed], progress: Progress) -> Iterator[list[Keyed]]:
        while items := take(1):
            [(key, number)] = items
            if number == self.broken:
                raise ZeroDivisionError("by a test")
            time.sleep(self.seconds)
            progress.add(ended=1, tokens=10)
            yield [(key, number * number)]
