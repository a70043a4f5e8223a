"""Streams packed samples from a feature store into training, resumable in the middle of an epoch."""

import logging
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import lightning
import numpy as np
import torch
from tqdm import tqdm

from eagle3.data.loader import PackLoader, SideStream
from eagle3.data.mix import Mixture, Rules
from eagle3.data.pack import Batch, Pack, pack_samples
from eagle3.data.plan import EpochPlan, PlannedPack, not_taken, plan_epoch
from eagle3.data.streaming import AHEAD, StreamReader, plan_stream
from eagle3.errors import InputError
from eagle3.features.loss_mask import AllTurns
from eagle3.features.sample import Sample
from eagle3.features.samples import SampleRef, Samples
from eagle3.features.source import REQUESTS, FeatureSource, as_setting
from eagle3.features.split import hash64
from eagle3.features.turns import anchors_of

log = logging.getLogger(__name__)


class FeatureData(lightning.LightningDataModule):
    """Training and validation batches of a feature source; a prompt's samples are all on one side of the split.

    `prepare` makes of a pack what the head trains on: on the CPU, in the reader threads.

    Needs `Trainer(reload_dataloaders_every_n_epochs=1)`: each epoch has its own plan.
    """

    def __init__(
        self,
        *,
        source: FeatureSource,
        prepare: Callable[[Pack], Batch],
        pack_tokens: int,
        val_fraction: float,
        limit_samples: int | None,
        rules: Rules,
        weights: list[float] | None,
        order: str,
        shuffle_buffer: int,
        prefetch: int,
        readers: int,
        verify: bool,
        seed: int,
        loss_mask: AllTurns,
    ) -> None:
        super().__init__()
        self.source, self.prepare = source, prepare
        self.pack_tokens, self.check_hashes = pack_tokens, verify
        self.prefetch, self.readers = prefetch, readers
        self.seed, self.loss_mask = seed, loss_mask
        self.buffer = shuffle_buffer if order == "streaming" else None
        self.ranges = ThreadPoolExecutor(AHEAD) if self.buffer else None
        self.stream: StreamReader | None = None
        self.requests = ThreadPoolExecutor(REQUESTS) if source.remote else None
        loss_mask.check(source.made_from)
        self.selected = rules.select(source.samples, source.location)
        self.train_samples, self.val_samples = self._split(val_fraction, limit_samples)
        self.mixture = Mixture(weights, self.train_samples, source) if weights else None
        self.resume_from: dict[str, Any] = {"epoch": 0, "consumed": 0, "before": []}
        self.before: list[dict[str, Any]] = []  # plans by which the epoch was trained so far, and how much of each
        self.current: PackLoader | None = None
        self.side_stream: SideStream | None = None

    def setup(self, stage: str) -> None:
        if self.check_hashes:
            self.source.verify(rank=self._lightning.global_rank, world_size=self._lightning.world_size)
        device = self._lightning.strategy.root_device
        self.side_stream = SideStream(device) if device.type == "cuda" else None

    def train_dataloader(self) -> PackLoader:
        epoch, rank = self._lightning.current_epoch, self._lightning.global_rank
        seed = hash64(self.seed, epoch)
        self.before = self.resume_from["before"] if epoch == self.resume_from["epoch"] else []
        samples, behind = self.mixture.epoch(seed) if self.mixture else self.train_samples, 0
        for other in self.before:
            samples = not_taken(samples, self._plans(samples, other["spread"], shuffle_seed=seed), other["consumed"])
            behind += other["consumed"]
        planned = self._plans(samples, self._spread(), shuffle_seed=seed)[rank]
        self.current = self._loader(planned, epoch=epoch, behind=behind)
        self.current.load_state_dict(self.resume_from)
        return self.current

    def val_dataloader(self) -> PackLoader:
        spread = {**self._spread(), "micro_batches": 1}
        planned = self._plans(self.val_samples, spread, shuffle_seed=None)[self._lightning.global_rank]
        return self._loader(planned, epoch=0)

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        if not batch.pack.input_ids.is_cuda:
            return batch.to(device, non_blocking=True)
        # Its memory belongs to the side stream, which must not reuse it before the training step has read it.
        for tensor in batch.tensors():
            tensor.record_stream(torch.cuda.current_stream(device))
        return batch

    @property
    def _lightning(self) -> lightning.Trainer:
        assert self.trainer is not None
        return self.trainer

    # A loader's own state may come too late, when Lightning has already asked for the first epoch's to count steps.
    def state_dict(self) -> dict[str, Any]:
        assert self.current is not None
        return {**self.current.state_dict(), "spread": self._spread(), "before": self.before}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where a run stopped; with another number of ranks, by a new plan of what it had not trained."""
        self.resume_from = self._resumed(state_dict)
        if (handed_out := self.current) is not None:  # trainer=fsdp counts steps before it restores
            vars(handed_out).update(vars(self.train_dataloader()))
            self.current = handed_out

    def _resumed(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        then, now = state_dict["spread"], self._spread()
        if then == now or state_dict["consumed"] == state_dict["packs"]:
            return state_dict
        before = [*state_dict["before"], {"spread": then, "consumed": state_dict["consumed"]}]
        behind = sum(each["consumed"] for each in before)
        if behind % now["micro_batches"]:
            raise InputError(
                f"ckpt_path: that run stopped behind pack {behind} of an epoch, in the middle of a step of "
                f"trainer.accumulate_grad_batches={now['micro_batches']}; go on with {then['micro_batches']}"
            )
        log.info("%d ranks instead of %d: what the epoch has left is planned anew", now["ranks"], then["ranks"])
        return {"epoch": state_dict["epoch"], "consumed": 0, "before": before}

    def _spread(self) -> dict[str, int]:
        """What the plan of an epoch depends on beside the samples."""
        return {"ranks": self._lightning.world_size, "micro_batches": self._lightning.accumulate_grad_batches}

    def read(self, ref: SampleRef) -> Sample:
        """A sample with the loss mask applied."""
        return self._masked(self.source.read(ref))

    def _masked(self, sample: Sample) -> Sample:
        return replace(sample, turns=self.loss_mask(sample))

    def _loader(self, planned: EpochPlan, *, epoch: int, behind: int = 0) -> PackLoader:
        load, begin = self._load, lambda consumed: None
        if planned.stream is not None:
            load, begin = self._load_of_stream, partial(self._begin_stream, planned)
        options = {"prefetch": self.prefetch, "readers": self.readers, "epoch": epoch, "behind": behind}
        return PackLoader(planned, load, begin=begin, **options)

    def _begin_stream(self, planned: EpochPlan, consumed: int) -> None:
        assert self.ranges is not None
        self.stream = StreamReader(self.source, planned.samples, planned.stream_after(consumed), self.ranges)

    def _load_of_stream(self, planned: PlannedPack) -> Batch:
        assert self.stream is not None
        return self._batch(planned, [self._masked(sample) for sample in self.stream.take(planned.places)])

    def _load(self, planned: PlannedPack) -> Batch:
        read = self.requests.map if self.requests else map
        return self._batch(planned, list(read(self.read, planned.samples)))

    def _batch(self, planned: PlannedPack, samples: list[Sample]) -> Batch:
        pack = pack_samples(
            samples,
            anchors_in_step=planned.anchors_in_step,
            samples_in_step=planned.samples_in_step,
            pin=self.side_stream is not None,
        )
        batch = self.prepare(pack)
        return batch if self.side_stream is None else self.side_stream.copy(batch)

    def _plans(self, samples: Samples, spread: dict[str, int], *, shuffle_seed: int | None) -> list[EpochPlan]:
        options = {
            "pack_tokens": self.pack_tokens, "world_size": spread["ranks"], "accumulate": spread["micro_batches"]
        }  # fmt: skip
        if self.buffer and shuffle_seed is not None:
            return plan_stream(samples, shuffle_seed=shuffle_seed, buffer=self.buffer, **options)
        return plan_epoch(samples, shuffle_seed=shuffle_seed, **options)

    def _split(self, val_fraction: float, limit: int | None) -> tuple[Samples, Samples]:
        samples = self._samples_with_anchors(limit)
        self._check_lengths(samples)
        # Of a few prompts none may lie below the fraction: then the lowest one validates.
        self.val_fraction = max(val_fraction, math.nextafter(float(samples.split.min()), 1))
        validates = samples.split < self.val_fraction
        train, val = samples.take(~validates), samples.take(validates)
        if not len(train):
            raise InputError(
                f"data.val_fraction={val_fraction} leaves none of the {len(samples)} samples of "
                f"{as_setting(self.source.location)} that can be trained for training; use more prompts or a smaller "
                "data.val_fraction"
            )
        return train, val

    def _samples_with_anchors(self, limit: int | None) -> Samples:
        fitting = self.loss_mask.select(self.selected)
        samples = fitting[:limit]
        if type(self.loss_mask) is not AllTurns:  # the index counts anchors of unmasked answers only
            counted = [self._count_anchors(ref) for ref in tqdm(samples, desc="count anchors under the loss mask")]
            if np.array_equal(counted, self.selected.anchors[:limit]):
                log.warning(
                    "loss_mask=%s changes nothing: no answer of %s holds what it leaves out (features.reasoning names "
                    "the markers of reasoning)",
                    type(self.loss_mask).__name__, as_setting(self.source.location),
                )  # fmt: skip
            samples = samples.with_anchors(np.array(counted))
        left_out = len(self.selected) - len(fitting) + int((samples.anchors <= 0).sum())
        samples = samples.take(samples.anchors > 0)
        if left_out:
            log.info(
                "loss_mask=%s trains nothing of %d of %d samples: they are left out",
                type(self.loss_mask).__name__, left_out, len(self.selected),
            )  # fmt: skip
        if not len(samples):
            raise InputError(
                f"loss_mask={type(self.loss_mask).__name__} leaves nothing to train in the "
                f"{len(self.selected)} samples of {as_setting(self.source.location)}; choose another loss_mask"
            )
        return samples

    def _count_anchors(self, ref: SampleRef) -> int:
        return len(anchors_of(self.read(ref).turns))

    def _check_lengths(self, samples: Samples) -> None:
        longest = samples[int(samples.tokens.argmax())].entry
        if longest.tokens > self.pack_tokens:
            too_long = int((samples.tokens > self.pack_tokens).sum())
            raise InputError(
                f"data.pack_tokens={self.pack_tokens} is less than {too_long} samples hold (the longest, "
                f"{longest.id}: {longest.tokens} tokens); set data.pack_tokens={longest.tokens} or more, or leave "
                f"them out with data.max_tokens={self.pack_tokens}"
            )
