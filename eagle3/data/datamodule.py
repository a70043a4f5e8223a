"""Reads packed samples from a feature store for training, resumable in the middle of an epoch."""

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import lightning
import torch
import torch.distributed as dist

from eagle3.adapters.lightning import reload_train_loader
from eagle3.data.choose import choose_samples
from eagle3.data.epochs import Epochs, Spread
from eagle3.data.loader import EpochPart, PackLoader, copy_on
from eagle3.data.mix import Mixture, SampleFilter
from eagle3.data.pack import Batch, Pack, pack_samples
from eagle3.data.plan import PlannedPack, plan_epoch
from eagle3.errors import InputError
from eagle3.features.loss_mask import AllTurns
from eagle3.features.sample import Sample
from eagle3.features.samples import SampleRef, Samples
from eagle3.features.source import REQUESTS, FeatureSource, MadeOnDemand, NoFeatures
from eagle3.settings.training import PackSettings

log = logging.getLogger(__name__)


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
    epochs: Epochs

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
        self.current: PackLoader | None = None
        self.refused = 0

    def setup(self, stage: str) -> None:
        if not hasattr(self, "epochs"):
            chosen = choose_samples(self.source, self.rules, self.loss_mask, self.settings)
            self.train_samples, self.val_samples, self.val_fraction = chosen
            weights = self.settings.weights
            epoch_samples = Mixture(weights, chosen.train, self.source).epoch if weights else lambda seed: chosen.train
            self.epochs = Epochs(epoch_samples, pack_tokens=self.settings.pack_tokens, seed=self.seed)
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

    @property
    def _lightning(self) -> lightning.Trainer:
        assert self.trainer is not None
        return self.trainer

    def _spread(self) -> Spread:
        return {"ranks": self._lightning.world_size, "micro_batches": self._lightning.accumulate_grad_batches}

    # --- loading -----------------------------------------------------------------------------------------------------

    def train_dataloader(self) -> PackLoader:
        epoch, rank = self._lightning.current_epoch, self._lightning.global_rank
        self.current = self._loader(lambda: self.epochs.part(epoch, self._spread(), rank))
        return self.current

    def val_dataloader(self) -> PackLoader:
        ranks, pack_tokens = self._lightning.world_size, self.settings.pack_tokens
        plans = plan_epoch(self.val_samples, pack_tokens=pack_tokens, world_size=ranks, accumulate=1, shuffle_seed=None)
        packs = plans[self._lightning.global_rank]
        return self._loader(lambda: EpochPart(0, packs), keep=True)

    def _loader(self, part: Callable[[], EpochPart], *, keep: bool = False) -> PackLoader:
        """`keep`: the same packs will be loaded again."""

        def ahead(packs: Iterator[PlannedPack]) -> AbstractContextManager[Any]:
            refs = (ref for pack in packs for ref in pack.samples)
            return self.source.ahead(refs, keep=keep) if isinstance(self.source, MadeOnDemand) else nullcontext()

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

    def read(self, ref: SampleRef) -> Sample:
        """Read a sample and apply the loss mask."""
        sample = self.source.read(ref)
        return replace(sample, turns=self.loss_mask(sample))

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        if not batch.pack.input_ids.is_cuda:
            return batch.to(device, non_blocking=True)
        # Its memory belongs to the side stream, which must not reuse it before the training step has read it.
        for tensor in batch.tensors():
            tensor.record_stream(torch.cuda.current_stream(device))
        return batch

    # --- resuming ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        assert self.current is not None
        state = self.current.state_dict()
        return {**state, "spread": self._spread(), "before": self.epochs.trained_before(state["epoch"]).before}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        counted = None if self.current is None else len(self.current)
        self.epochs.resume(state_dict, self._spread())
        if self.current is not None and len(self.current) != counted:
            reload_train_loader(self._lightning)

    def packs_in_epoch(self) -> int:
        """Count a rank's packs in the first epoch, planned as a whole; others may have a few more or less."""
        return self.epochs.packs_in_first(self._spread())
