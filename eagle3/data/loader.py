"""Reads packs ahead of the training step, in threads, and copies them to the GPU while the step runs.

Worker processes would copy every sample through shared memory.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from eagle3.data.pack import Batch
from eagle3.data.plan import PlannedPack


@dataclass(frozen=True)
class EpochPart:
    """A rank's part of an epoch: the packs of one plan, from `start` on.

    `earlier` counts packs of the epoch that the rank trained under other plans, before the number of ranks changed."""

    epoch: int
    packs: Sequence[PlannedPack]
    start: int = 0
    earlier: int = 0


class PackLoader:
    """Loads the packs of one epoch on one rank.

    `part` is called when an iteration starts, not before: Lightning may ask for a loader first and restore the
    checkpoint of a resumed run later. `ahead` prepares for the packs that the iteration loads, while it lasts.
    `consumed` counts packs of the part that were handed out or trained earlier, `waited` the seconds spent waiting.
    """

    def __init__(
        self,
        part: Callable[[], EpochPart],
        load: Callable[[PlannedPack], Batch],
        *,
        ahead: Callable[[Iterator[PlannedPack]], AbstractContextManager[Any]] = nullcontext,
        prefetch: int,
        readers: int,
    ) -> None:
        self.part, self.load, self.ahead = part, load, ahead
        self.prefetch, self.readers = prefetch, readers
        self._consumed: int | None = None
        self.waited = 0.0

    def __len__(self) -> int:
        part = self.part()
        return part.earlier + len(part.packs)

    def __iter__(self) -> Iterator[Batch]:
        part = self.part()
        self._consumed = part.start
        waiting, known = ((part.packs[number] for number in range(part.start, len(part.packs))) for _ in range(2))
        # One thread for a reader's tensors too: teams of threads would compete with the training step for the cores.
        one_thread: dict[str, Any] = {"initializer": torch.set_num_threads, "initargs": (1,)}
        with self.ahead(known), ThreadPoolExecutor(self.readers, **one_thread) as readers:
            ahead = [readers.submit(self.load, pack) for pack in islice(waiting, self.prefetch)]
            while ahead:
                asked = time.perf_counter()
                pack = ahead.pop(0).result()
                self.waited += time.perf_counter() - asked
                ahead += [readers.submit(self.load, upcoming) for upcoming in [next(waiting, None)] if upcoming]
                self._consumed += 1
                yield pack

    @property
    def consumed(self) -> int:
        return self.part().start if self._consumed is None else self._consumed

    def state_dict(self) -> dict[str, int]:
        part = self.part()
        return {"epoch": part.epoch, "consumed": self.consumed, "packs": len(part.packs)}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Do nothing: the data module restores the state. Lightning takes a loader for resumable if it has this."""


def copy_on(stream: torch.cuda.Stream, batch: Batch) -> Batch:
    """Copy a batch to a GPU; the reader thread that calls this waits for the copy, the training step does not."""
    with torch.cuda.stream(stream):
        copied = batch.to(stream.device, non_blocking=True)
    stream.synchronize()
    return copied
