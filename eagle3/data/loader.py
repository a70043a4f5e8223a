"""Reads packs ahead of the training step, in threads, and copies them to the GPU beside it.

Worker processes would copy every sample through shared memory.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import torch

from eagle3.data.pack import AnyBatch, Batch
from eagle3.data.plan import PlannedPack


class PackLoader:
    """The packs of one epoch on one rank; `consumed` counts those handed out, also by the run that this one resumes.

    `behind`: packs of the epoch that a rank had by other plans, which are no part of this one and count for its length.
    `begin` is told how many were consumed, before the first is loaded. `waited`: seconds for which a pack was asked for
    and not there.
    """

    def __init__(
        self,
        planned: Sequence[PlannedPack],
        load: Callable[[PlannedPack], Batch],
        *,
        begin: Callable[[int], None] = lambda consumed: None,
        prefetch: int,
        readers: int,
        epoch: int,
        behind: int = 0,
    ) -> None:
        self.planned, self.load, self.begin, self.epoch = planned, load, begin, epoch
        self.prefetch, self.readers, self.behind = prefetch, readers, behind
        self.start, self.consumed, self.waited = 0, 0, 0.0

    def __len__(self) -> int:
        return self.behind + len(self.planned)

    def __iter__(self) -> Iterator[Batch]:
        self.consumed, self.start = self.start, 0  # validation goes over one loader many times, from its first pack
        self.begin(self.consumed)
        waiting = (self.planned[number] for number in range(self.consumed, len(self.planned)))
        # One thread for a reader's tensors too: teams of threads would fight the training step for the cores.
        with ThreadPoolExecutor(self.readers, initializer=torch.set_num_threads, initargs=(1,)) as readers:
            ahead = [readers.submit(self.load, pack) for pack in islice(waiting, self.prefetch)]
            while ahead:
                asked = time.perf_counter()
                pack = ahead.pop(0).result()
                self.waited += time.perf_counter() - asked
                ahead += [readers.submit(self.load, upcoming) for upcoming in [next(waiting, None)] if upcoming]
                self.consumed += 1
                yield pack

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "consumed": self.consumed, "packs": len(self.planned)}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        if state_dict["epoch"] == self.epoch:
            self.start = self.consumed = state_dict["consumed"]


class SideStream:
    """Copies packs to a GPU while it computes."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)

    def copy(self, batch: AnyBatch) -> AnyBatch:
        """Returns when the copy is whole: the reader thread that calls this waits, the training step does not."""
        with torch.cuda.stream(self.stream):
            copied = batch.to(self.stream.device, non_blocking=True)
        self.stream.synchronize()
        return copied
