"""Workers that stay ready from one call to the next: the stages that use the same task start it once."""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, Self

from eagle3.workers.meter import Progress
from eagle3.workers.task import Build, Keyed, Total, Workers


class Continued:
    """`Workers` whose calls are parts of one call of other workers, made by `workers` when the first item comes. It is
    also what that call gets: the iterator of all items, and their `Progress`.

    All calls must give a `build` that makes the same task: the first one is used. One call at a time: it ends when each
    of its items has a result. The task then waits for the items of the next call, until `close`."""

    def __init__(self, workers: Callable[[], Workers]) -> None:
        self.workers = workers
        self.note = ""
        self._items: Iterator[Keyed] = iter(())
        self._progress: Progress | None = None
        self._out = 0  # items that have been taken and have no result so far
        self._left: int | None = None  # items of this call without a result, where their number is known
        self._results: Iterator[list[Keyed]] | None = None

    def __call__(
        self, build: Build, items: Iterable[Keyed], progress: Progress, *, ahead: int, total: Total = None
    ) -> Iterator[list[Keyed]]:
        remaining = iter(items)
        first = next(remaining, None)
        if first is None:  # nothing is started for no item
            return
        self._items, self._progress = chain([first], remaining), progress
        self._left = total if isinstance(total, int) else None
        if self._results is None:
            self._results = self.workers()(build, self, self, ahead=ahead, total=lambda: self._left)
        for results in self._results:
            self._out -= len(results)
            self._left = None if self._left is None else self._left - len(results)
            yield results
            if self._is_done():
                return

    def add(self, *, ended: int = 0, tokens: int = 0) -> None:
        assert self._progress is not None
        self._progress.note = self.note
        self._progress.add(ended=ended, tokens=tokens)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Keyed:
        """Return the next item. StopIteration means that there is none at the moment: iterators of `Workers` are asked
        again after each result."""
        item = next(self._items)
        self._out += 1
        return item

    def _is_done(self) -> bool:
        if self._out:
            return False
        following = next(self._items, None)
        if following is not None:
            self._items = chain([following], self._items)
        return following is None

    def close(self) -> None:
        """Let the workers end, and stop their servers."""
        self._items = iter(())
        results, self._results = self._results, None
        if results is not None:
            for _ in results:
                pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is None:
            return self.close()
        results, self._results = self._results, None
        if results is not None:  # ends at once, also in the middle of items
            results.close()  # type: ignore[attr-defined]
