"""One piece of work over several processes, its results in the order of the tasks, whoever finishes first."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Generic, TypeVar

from loky import ProcessPoolExecutor

from eagle3.errors import InputError

Task = TypeVar("Task")
Result = TypeVar("Result")

AHEAD = 2  # tasks that each process may be ahead of the one whose turn it is
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # of a worker: the processes share the cores already
IDLE_SECONDS = 60  # after which a worker ends by itself; one that lost its parent to kill -9 has no other way to know


class OrderedPool(Generic[Task, Result]):
    """Gives `work`, which every process is sent once, its tasks. One process is this one."""

    def __init__(self, work: Callable[[Task], Result], processes: int):
        self.work = work
        self.processes = processes
        # loky's workers do not import the entry script, and with it PyTorch, and one that is killed ends the run.
        self.pool = (
            ProcessPoolExecutor(processes, timeout=IDLE_SECONDS, initializer=_start, initargs=(work,), env=ONE_THREAD)
            if processes > 1
            else None
        )

    def __enter__(self) -> "OrderedPool[Task, Result]":
        return self

    def __call__(self, tasks: Iterable[Task]) -> Iterator[tuple[Task, Result]]:
        """Yield each task with its result; of `tasks` a few more are taken than have been yielded."""
        if self.pool is None:
            yield from ((task, self.work(task)) for task in tasks)
            return
        waiting: deque[tuple[Task, Future]] = deque()
        try:
            for task in tasks:
                waiting.append((task, self.pool.submit(_work, task)))
                if len(waiting) > AHEAD * self.processes:
                    yield _finished(*waiting.popleft())
            while waiting:
                yield _finished(*waiting.popleft())
        except BrokenProcessPool:
            raise InputError(
                f"a process was killed while it read prompts, most likely because memory ran out; what was read is "
                f"kept: run the same command with fewer of them, e.g. prompts.processes={self.processes // 2}"
            ) from None

    def __exit__(self, *_: object) -> None:
        if self.pool is not None:
            self.pool.shutdown(kill_workers=True)


def _finished(task: Any, future: Future) -> tuple[Any, Any]:
    return task, future.result()


_of_this_process: Callable[[Any], Any] | None = None


def _start(work: Callable[[Any], Any]) -> None:
    global _of_this_process
    _of_this_process = work


def _work(task: Any) -> Any:
    assert _of_this_process is not None
    return _of_this_process(task)


def in_threads(work: Callable[[Task], None], tasks: Iterable[Task], threads: int) -> None:
    """Do what numpy does without holding the interpreter, and wait for it."""
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(work, tasks):
            pass
