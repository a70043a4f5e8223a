"""Reads packed samples from a feature store for training, resumable in the middle of an epoch."""

import logging
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import lightning
import numpy as np
import torch
import torch.distributed as dist

from eagle3.adapters.lightning import reload_train_loader
from eagle3.data.loader import EpochPart, PackLoader, copy_on
from eagle3.data.mix import Mixture, SampleFilter
from eagle3.data.pack import Batch, Pack, pack_samples
from eagle3.data.plan import EpochPlan, PlannedPack, not_taken, plan_epoch
from eagle3.errors import InputError
from eagle3.features.loss_mask import AllTurns
from eagle3.features.sample import Sample
from eagle3.features.samples import SampleRef, Samples
from eagle3.features.source import REQUESTS, FeatureSource, MadeOnDemand, NoFeatures, as_setting
from eagle3.features.split import hash64
from eagle3.features.turns import anchors_of
from eagle3.progress import Bar
from eagle3.settings.training import PackSettings

log = logging.getLogger(__name__)
FROM_THE_START: dict[str, Any] = {"epoch": 0, "consumed": 0, "before": []}


class FeatureData(lightning.LightningDataModule):
    """Training and validation batches of a feature source. All samples of a prompt are on one side of the split.

    `setup("fit")` chooses and splits the samples, after which `train_samples`, `val_samples` and `val_fraction` are
    known. Like in Lightning's own examples it may be called before there is a trainer; the trainer's call then verifies
    the shards. `prepare` turns a pack into the training batch of the head, on the CPU, in the reader threads.
    `settings` are the fields of PackSettings.

    Needs `Trainer(reload_dataloaders_every_n_epochs=1)`: each epoch has its own plan.
    """

    train_samples: Samples
    val_samples: Samples
    selected: Samples  # by the rules, before the loss mask

    def __init__(
        self,
        *,
        source: FeatureSource,
        prepare: Callable[[Pack], Batch],
        rules: SampleFilter,
        seed: int = 0,
        loss_mask: AllTurns | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        self.source, self.prepare, self.loss_mask = source, prepare, loss_mask or AllTurns()
        self.rules, self.seed, self.settings = rules, seed, PackSettings(**settings)
        self.val_fraction = self.settings.val_fraction
        self.requests = ThreadPoolExecutor(REQUESTS) if source.remote else None
        self.side_stream: torch.cuda.Stream | None = None
        self.mixture: Mixture | None = None
        self.resumed = FROM_THE_START
        self.current: PackLoader | None = None
        self._planned: EpochPart | None = None
        self.refused = 0

    def setup(self, stage: str) -> None:
        if not hasattr(self, "train_samples"):
            self.loss_mask.check(self.source.made_from)
            self.selected = self.rules.select(self.source.samples, self.source.location)
            self.train_samples, self.val_samples = self._split()
            weights = self.settings.weights
            self.mixture = Mixture(weights, self.train_samples, self.source) if weights else None
        if self.trainer is not None:
            if self.settings.verify:
                self._verify(self.trainer.global_rank, self.trainer.world_size)
            device = self.trainer.strategy.root_device
            self.side_stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def _verify(self, rank: int, world_size: int) -> None:
        """Verify this rank's share of the shards. All ranks raise what one has found: else the others would wait for it
        and end with a traceback of the lost connection."""
        found = [""] * world_size
        try:
            self.source.verify(rank=rank, world_size=world_size)
        except InputError as error:
            found[rank] = str(error)
        if world_size > 1:
            dist.all_gather_object(found, found[rank])
        if any(found):
            raise InputError("; ".join(filter(None, found)))

    def train_dataloader(self) -> PackLoader:
        self.current = self._loader(partial(self._part, self._lightning.current_epoch))
        return self.current

    def val_dataloader(self) -> PackLoader:
        spread = {**self._spread(), "micro_batches": 1}
        packs = self._plans(self.val_samples, spread, shuffle_seed=None)[self._lightning.global_rank]
        return self._loader(lambda: EpochPart(0, packs), keep=True)

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

    # --- resuming ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        assert self.current is not None
        state = self.current.state_dict()
        return {**state, "spread": self._spread(), "before": self._resumed_in(state["epoch"])["before"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume where a run stopped; with another number of ranks, by a new plan for the samples that are left."""
        counted = None if self.current is None else len(self.current)
        self.resumed, self._planned = self._replanned(state_dict), None
        if self.current is not None and len(self.current) != counted:
            reload_train_loader(self._lightning)

    def _replanned(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        then, now = state_dict["spread"], self._spread()
        if then == now or state_dict["consumed"] == state_dict["packs"]:
            return state_dict
        before = [*state_dict["before"], {"spread": then, "consumed": state_dict["consumed"]}]
        earlier = sum(each["consumed"] for each in before)
        if earlier % now["micro_batches"]:
            raise InputError(
                f"ckpt_path: that run stopped after pack {earlier} of an epoch, in the middle of a step of "
                f"trainer.accumulate_grad_batches={now['micro_batches']}; resume with {then['micro_batches']}"
            )
        spread = "ranks=%d and trainer.accumulate_grad_batches=%d"
        log.info(f"{spread} instead of {spread}: the rest of the epoch is planned again", *now.values(), *then.values())
        return {"epoch": state_dict["epoch"], "consumed": 0, "before": before}

    def _resumed_in(self, epoch: int) -> dict[str, Any]:
        return self.resumed if epoch == self.resumed["epoch"] else FROM_THE_START

    def _spread(self) -> dict[str, int]:
        """Return the settings that the plan of an epoch depends on."""
        return {"ranks": self._lightning.world_size, "micro_batches": self._lightning.accumulate_grad_batches}

    # --- plans and packs ---------------------------------------------------------------------------------------------

    def _part(self, epoch: int) -> EpochPart:
        """Plan this rank's part of the epoch, without samples that the run trained under other plans."""
        if self._planned is None or self._planned.epoch != epoch:
            seed, resumed = hash64(self.seed, epoch), self._resumed_in(epoch)
            samples = self._samples_of_epoch(seed)
            for other in resumed["before"]:
                plans = self._plans(samples, other["spread"], shuffle_seed=seed)
                samples = not_taken(samples, plans, other["consumed"])
            packs = self._plans(samples, self._spread(), shuffle_seed=seed)[self._lightning.global_rank]
            earlier = sum(other["consumed"] for other in resumed["before"])
            self._planned = EpochPart(epoch, packs, start=resumed["consumed"], earlier=earlier)
        return self._planned

    def packs_in_epoch(self) -> int:
        """Count a rank's packs in the first epoch, planned as a whole; others may have a few more or less."""
        seed = hash64(self.seed, 0)
        return len(self._plans(self._samples_of_epoch(seed), self._spread(), shuffle_seed=seed)[0])

    def _samples_of_epoch(self, seed: int) -> Samples:
        return self.mixture.epoch(seed) if self.mixture else self.train_samples

    def read(self, ref: SampleRef) -> Sample:
        """Read a sample and apply the loss mask."""
        sample = self.source.read(ref)
        return replace(sample, turns=self.loss_mask(sample))

    def _loader(self, part: Callable[[], EpochPart], *, keep: bool = False) -> PackLoader:
        """`keep`: the same packs will be loaded again."""
        source = self.source

        def ahead(packs: Iterator[PlannedPack]) -> AbstractContextManager[Any]:
            if not isinstance(source, MadeOnDemand):
                return nullcontext()
            return source.ahead((ref for pack in packs for ref in pack.samples), keep=keep)

        own = {"prefetch": self.settings.prefetch, "readers": self.settings.readers}
        return PackLoader(part, self._load, ahead=ahead, **own)

    def _read_all(self, planned: PlannedPack) -> list[Sample]:
        """Read the samples of a pack. Those that the target refuses are counted and left out; NoFeatures if all are."""
        read = self.requests.map if self.requests else map
        found = [*read(self._read_or_refused, planned.samples)]
        samples = [each for each in found if isinstance(each, Sample)]
        if not samples:
            raise next(each for each in found if isinstance(each, NoFeatures))
        return samples

    def _read_or_refused(self, ref: SampleRef) -> Sample | NoFeatures:
        try:
            return self.read(ref)
        except NoFeatures as refused:
            self.refused += 1
            log.warning("%s; samples left out so far: %d", refused, self.refused)
            return refused

    def _load(self, planned: PlannedPack) -> Batch:
        pack = pack_samples(
            self._read_all(planned),
            anchors_in_step=planned.anchors_in_step,
            samples_in_step=planned.samples_in_step,
            pin=self.side_stream is not None,
        )
        batch = self.prepare(pack)
        return batch if self.side_stream is None else copy_on(self.side_stream, batch)

    def _plans(self, samples: Samples, spread: dict[str, int], *, shuffle_seed: int | None) -> list[EpochPlan]:
        return plan_epoch(
            samples,
            pack_tokens=self.settings.pack_tokens,
            world_size=spread["ranks"],
            accumulate=spread["micro_batches"],
            shuffle_seed=shuffle_seed,
        )

    # --- choosing samples --------------------------------------------------------------------------------------------

    def _split(self) -> tuple[Samples, Samples]:
        samples = self._samples_with_anchors()
        self._check_lengths(samples)
        # If there are only a few prompts, none may be below the fraction: then the lowest one validates.
        given = self.val_fraction
        self.val_fraction = max(given, math.nextafter(float(samples.split.min()), 1))
        validates = samples.split < self.val_fraction
        train, val = samples.take(~validates), samples.take(validates)
        if not len(train):
            smaller = " or a smaller data.val_fraction" if np.ptp(samples.split) else ": the only one validates"
            raise InputError(
                f"data.val_fraction={given} leaves none of the {len(samples)} samples of "
                f"{as_setting(self.source.location)} for training; use more prompts{smaller}"
            )
        return train, val

    def _samples_with_anchors(self) -> Samples:
        fitting = self.loss_mask.select(self.selected)
        samples = fitting[: self.settings.limit_samples]
        if type(self.loss_mask) is not AllTurns:  # the index counts anchors of unmasked answers only
            source = self.source
            read = source.without_features if isinstance(source, MadeOnDemand) else source.read
            masked = map(self.loss_mask, map(read, Bar(samples, desc="count anchors under the loss mask")))
            counted = [len(anchors_of(turns)) for turns in masked]
            if np.array_equal(counted, self.selected.anchors[: self.settings.limit_samples]):
                log.warning(
                    "loss_mask=%s changes nothing: no answer of %s contains what it leaves out (features.reasoning "
                    "names the markers of reasoning)",
                    type(self.loss_mask).__name__, as_setting(self.source.location),
                )  # fmt: skip
            samples = replace(samples, anchors=np.array(counted, np.int32))
        left_out = len(self.selected) - len(fitting) + int((samples.anchors <= 0).sum())
        samples = samples.take(samples.anchors > 0)
        if left_out:
            log.info(
                "loss_mask=%s leaves nothing to train in %d of %d samples: they are left out",
                type(self.loss_mask).__name__, left_out, len(self.selected),
            )  # fmt: skip
        if not len(samples):
            raise InputError(
                f"loss_mask={type(self.loss_mask).__name__} leaves nothing to train in the "
                f"{len(self.selected)} samples of {as_setting(self.source.location)}; choose another loss_mask"
            )
        return samples

    def _check_lengths(self, samples: Samples) -> None:
        longest, pack_tokens = samples[int(samples.tokens.argmax())].entry, self.settings.pack_tokens
        if longest.tokens > pack_tokens:
            too_long = int((samples.tokens > pack_tokens).sum())
            raise InputError(
                f"data.pack_tokens={pack_tokens} is too small for {too_long} samples (the longest, "
                f"{longest.id}: {longest.tokens} tokens); set data.pack_tokens={longest.tokens} or more, or leave "
                f"them out with data.max_tokens={pack_tokens}"
            )
