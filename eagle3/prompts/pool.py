"""Runs tasks in several processes and yields their results in the order of the tasks."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from loky import ProcessPoolExecutor

from eagle3.errors import InputError

Task = TypeVar("Task")
Result = TypeVar("Result")

AHEAD = 2  # tasks per process that may wait for an earlier one
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # per worker: there is one process per core
IDLE_SECONDS = 60  # then a worker ends by itself: its parent may have been killed with -9


def in_order(work: Callable[[Task], Result], tasks: Iterable[Task], *, processes: int) -> Iterator[tuple[Task, Result]]:
    """Yield each task with its result. `work` is pickled to every process once; one process runs here.

    Takes a few `tasks` ahead of the results. Raises InputError if a process is killed.
    """
    if processes <= 1:
        yield from ((task, work(task)) for task in tasks)
        return
    # loky's workers do not import the entry script with its PyTorch, and a killed worker raises an error.
    pool = ProcessPoolExecutor(processes, timeout=IDLE_SECONDS, initializer=_start, initargs=(work,), env=ONE_THREAD)
    waiting: deque = deque()
    try:
        for task in tasks:
            waiting.append((task, pool.submit(_work, task)))
            if len(waiting) > AHEAD * processes:
                task, future = waiting.popleft()
                yield task, future.result()
        for task, future in waiting:
            yield task, future.result()
    except BrokenProcessPool:
        raise InputError(
            f"a process was killed while it read prompts, most likely because memory ran out; finished chunks "
            f"are kept: run the same command with fewer of them, e.g. prompts.processes={processes // 2}"
        ) from None
    finally:
        pool.shutdown(kill_workers=True)


_of_this_process: Callable[[Any], Any] | None = None


def _start(work: Callable[[Any], Any]) -> None:
    global _of_this_process
    _of_this_process = work


def _work(task: Any) -> Any:
    assert _of_this_process is not None
    return _of_this_process(task)
