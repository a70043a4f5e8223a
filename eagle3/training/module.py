"""The LightningModule: calls the unroll and the loss, logs. No mathematics here.

Shapes: V target vocabulary, D draft vocabulary, H hidden size, K steps, S lengths of chains, C = K + 1 counts of
accepted drafts, N = 4K + 3 sums of a step or a validation.
"""

import logging
import math
from dataclasses import asdict
from typing import Any

import lightning
import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.optim import Optimizer

from eagle3.adapters.lightning import resume_after_finished_epochs, skip_needless_moves
from eagle3.errors import InputError
from eagle3.head.batch import TttBatch
from eagle3.head.divergence import PlainDivergence, require_consistent
from eagle3.head.draft_head import own_layer
from eagle3.head.head import Head
from eagle3.head.kernels import KernelPlan, KernelSettings, choose_kernels
from eagle3.head.kind import described
from eagle3.head.loss import UnrollLoss, UnrollMetrics, accept_length, plain_loss
from eagle3.head.registry import kind_named
from eagle3.head.simulate_decoding import simulate_rounds
from eagle3.head_files.record import Origin
from eagle3.settings.training import served_steps
from eagle3.target.facts import LogitTransform
from eagle3.training.callbacks import ends_step, logs_step, warn_of_little
from eagle3.training.checkpoint_file import KEY, TrainingRecord
from eagle3.training.optim import AdamWCosine, by_parameter, trained, whole
from eagle3.training.schedule import ShareLR
from eagle3.training.step_graphs import Compute, StepGraphs

log = logging.getLogger(__name__)


class HeadTraining(lightning.LightningModule):
    """Trains a draft head. `origin` says on what and `settings` how; both are in every checkpoint.

    Checkpoints have no hyperparameters, and `load_from_checkpoint` needs all arguments of this class: head, loss and
    optimizer are objects, and the target's weights are in the feature store. `python train.py ckpt_path=…` resumes a
    training; `eagle3.serving.head.export.read_trained(path)` reads a head for use; the record that both rely on is
    TrainingRecord (checkpoint.py), in plain data.
    """

    embedding: Float[Tensor, "V H"]
    teacher_head: Float[Tensor, "D H"]
    step_sums: Float[Tensor, " N"]  # float32 like all tensors of a step: MPS has no float64
    kernels: KernelPlan
    compute_step: Compute
    grad_norm: Float[Tensor, ""]  # of the latest step, before clipping
    lr: float  # in the latest step

    def __init__(
        self,
        *,
        head: Head,
        loss: UnrollLoss,
        optim: AdamWCosine,
        ttt_steps: int,
        kernels: KernelSettings,
        embedding: Float[Tensor, "V H"],
        lm_head: Float[Tensor, "V H"],
        logit_transform: LogitTransform,
        origin: Origin,
        settings: dict,
    ) -> None:
        super().__init__()
        self.head, self.loss, self.optim = head, loss, optim
        self.kind = kind_named(head.kind)
        self.ttt_steps, self.kernel_settings = ttt_steps, kernels
        self.logit_transform, self.origin, self.settings = logit_transform, origin, settings
        # The target's weights are read from the store at every start; checkpoints have only the head's.
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("teacher_head", lm_head[head.draft_ids], persistent=False)
        self.register_buffer("step_sums", torch.zeros(4 * ttt_steps + 3), persistent=False)
        self.served_steps = served_steps(ttt_steps)
        # Sums of a validation, in float64 on the CPU, which waits for each of its steps anyway.
        self.val_sums = np.zeros(4 * ttt_steps + 3)
        self.served = np.zeros((len(self.served_steps), ttt_steps + 1))

    def configure_model(self) -> None:
        """With trainer=fsdp, shard weights, gradients and optimizer state over the ranks (FSDP2).

        In a two-dimensional mesh the first dimension has replicas (machines), the second shards (GPUs of one machine).
        All parameters are one group, gathered for a step: the unroll uses every weight K times, and would gather it K
        times if it were freed. Under bf16-mixed the gathered weights are in bfloat16; shards, their gradients and the
        optimizer's state stay in float32."""
        if self.device_mesh is None:
            return
        half = self.trainer.precision == "bf16-mixed"
        dtype, wide = (torch.bfloat16, torch.float32) if half else (None, None)
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=wide)
        fully_shard(self, mesh=self.device_mesh, mp_policy=policy, reshard_after_forward=False)
        for name in ("training_step", "validation_step"):  # Lightning calls these instead of `forward`
            register_fsdp_forward_method(self, name)

    def setup(self, stage: str) -> None:
        resume_after_finished_epochs(self.trainer)
        skip_needless_moves()
        self.choose_kernels(self.trainer.strategy.root_device, self.trainer.precision)

    def choose_kernels(self, device: torch.device, precision: str) -> None:
        """Choose what computes a step on a device, under the trainer's precision."""
        self.kernels = choose_kernels(
            self.kernel_settings,
            device=device,
            precision=precision,
            config=self.head.config,
            divergence=self.loss.divergence,
            layer_obstacle=own_layer(self.head),
            graphs_obstacle=self._graphs_obstacle(),
        )
        vocab_size, by_gradient = self.head.config.draft_vocab_size, self.kernels.loss is not plain_loss
        require_consistent(self.loss.divergence, vocab_size, device, uses_gradient=by_gradient)
        self.compute_step = self.loss_and_sums
        if self.kernels.cuda_graphs:
            self.compute_step = StepGraphs(self.loss_and_sums, trained(self.head), self.ttt_steps)

    def training_step(self, batch: TttBatch, batch_idx: int) -> Tensor:
        loss, sums = self.compute_step(batch)
        self.step_sums += self._with_loss(sums, loss.detach(), batch)
        return loss

    def on_train_batch_end(self, outputs: object, batch: TttBatch, batch_idx: int) -> None:
        """Log a step when all of its kernels are launched: the host waits for the GPU once, and computes the rest."""
        if logs_step(self.trainer, batch_idx):
            sums = self.trainer.strategy.reduce(self.step_sums, reduce_op="sum")
            values = torch.cat([sums, whole(self.grad_norm)[None]]).cpu()
            self._require_finite("train/grad_norm", values[-1])
            self.log("train/grad_norm", values[-1])
            self.log("train/lr", torch.tensor(self.lr))  # a float would be copied to the GPU, for which the host waits
            self._log("train", values[:-1])
        if ends_step(self.trainer, batch_idx):
            self.step_sums.zero_()

    def validation_step(self, batch: TttBatch, batch_idx: int) -> None:
        loss, metrics = self.compute_loss(batch)
        self.val_sums += self._with_loss(metrics.as_tensor(), loss, batch).cpu().numpy()
        accepted, anchors = metrics.accepted.cpu().numpy(), batch.anchors.cpu().numpy()
        for served, steps in zip(self.served, self.served_steps, strict=True):
            served[: steps + 1] += simulate_rounds(accepted, anchors, steps=steps)

    def on_validation_epoch_start(self) -> None:
        self.val_sums.fill(0)
        self.served.fill(0)

    def on_validation_epoch_end(self) -> None:
        logged = self._log("val", self._over_ranks(self.val_sums))
        counts = self._over_ranks(self.served)
        at_least = counts.flip(1).cumsum(1).flip(1)  # (S, C), verifications that accept 0, 1, … drafts or more
        shares = at_least[:, 1:] / at_least[:, :1].clamp(min=1)
        served = dict(zip(self.served_steps, 1 + shares.sum(1), strict=True))
        values = {f"val/served_accept_length_{steps}": value for steps, value in served.items()}
        values |= {f"val/served_reach_{depth}": share for depth, share in enumerate(shares[-1], start=1)}
        # These are over all ranks already; without sync_dist, here and below, Lightning would warn that they are not.
        self.log_dict({name: value.float() for name, value in values.items()}, sync_dist=True)
        if self.trainer.is_global_zero:
            chains = ", ".join(f"{value:.3f} ({steps} steps)" for steps, value in served.items())
            log.info(
                "step %d: val/loss %.3f, val/accept_length %.3f; served %s",
                self.trainer.global_step, logged["val/loss"], logged["val/accept_length"], chains,
            )  # fmt: skip

    def configure_optimizers(self) -> OptimizerLRScheduler:
        total_steps = self.trainer.estimated_stepping_batches
        if not math.isfinite(total_steps):
            raise InputError(
                f"trainer.max_epochs={self.trainer.max_epochs} leaves the learning rate's schedule without an end; set "
                f"trainer.max_epochs or trainer.max_steps (trainer.max_time may still end the training earlier)"
            )
        optimizer, schedule = self.optim.build(
            self.head, int(total_steps), by_graph=self.kernels.cuda_graphs, ranks=ranks_of_machine(self.trainer)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_start(self) -> None:
        """Let the learning rate follow the share of the training that is done."""
        warn_of_little(self.trainer, int(self.trainer.estimated_stepping_batches))
        schedule, trainer = self.lr_schedulers(), self.trainer
        if not isinstance(schedule, ShareLR):  # of an optimizer of the user's own
            return
        packs: float = trainer.num_training_batches
        if trainer.ckpt_path is not None:  # this epoch may be planned in two ways
            packs, limit = trainer.datamodule.packs_in_epoch(), trainer.limit_train_batches  # type: ignore[attr-defined]
            packs = min(packs, limit) if isinstance(limit, int) else int(packs * limit)
        steps_in_epoch = math.ceil(packs / trainer.accumulate_grad_batches)
        changed = schedule.start(steps_in_epoch, trainer.max_epochs or -1, trainer.max_steps)
        if changed:
            log.info("%s (init_from=HEAD starts a new training from a head)", changed)

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Keep what is logged of the gradient and the optimizer, then clip.

        Lightning calls this in each step, whether it clips or not. It refuses to clip for a fused optimizer under
        bf16-mixed, although there is no loss scaling that would prevent it."""
        parameters = trained(self.head)
        self.lr = optimizer.param_groups[0]["lr"]  # one for all groups; the schedule changes it before this is logged
        self.grad_norm = nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])
        if gradient_clip_val and gradient_clip_algorithm == "value":
            nn.utils.clip_grad_value_(parameters, gradient_clip_val)
        elif gradient_clip_val:
            nn.utils.clip_grads_with_norm_(parameters, gradient_clip_val, self.grad_norm)

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        # Every checkpoint is checked: a step between two logged ones can spoil the weights.
        norm = whole(nn.utils.get_total_norm([each.detach() for each in self.head.parameters()]))
        self._require_finite("norm of the weights", norm)
        if self.device_mesh is None and "optimizer_states" in checkpoint:  # with trainer=fsdp Lightning has done so
            saved = zip(checkpoint["optimizer_states"], self.trainer.optimizers, strict=True)
            checkpoint["optimizer_states"] = [by_parameter(*each, self.parameters()) for each in saved]
        metrics = self.trainer.callback_metrics
        checkpoint[KEY] = asdict(
            TrainingRecord(
                format_version=TrainingRecord.FORMAT_VERSION,
                kind=self.kind.name,
                head_config=asdict(self.head.config),
                ttt_steps=self.ttt_steps,
                accept_length={key: float(value) for key, value in metrics.items() if key.startswith("val/")},
                origin=self.origin,
                settings=self.settings,
            )
        )

    def compute_loss(self, batch: TttBatch) -> tuple[Tensor, UnrollMetrics]:
        hidden = self.kind.unroll(self.head, self.embedding, batch, self.ttt_steps, self.kernels)
        shape, kind = (len(batch.anchors), self.head.config.hidden_size), f"model.kind={self.kind.name}"
        states = [each for each in hidden if isinstance(each, Tensor)] if isinstance(hidden, list) else []
        if [each.shape for each in states] != [shape] * self.ttt_steps or len(states) < len(hidden):
            raise InputError(
                f"{kind}: its unroll returns {described(hidden)}; return a list of {self.ttt_steps} tensors of shape "
                f"{shape}: the state of each step at each anchor"
            )
        if torch.is_grad_enabled() and not any(each.requires_grad for each in hidden):
            raise InputError(
                f"{kind}: what its unroll returns has no gradient; compute it without detach() or no_grad()"
            )
        made = self.loss(self.head, hidden, self.teacher_head, batch, self.kernels.loss, self.logit_transform)
        is_pair = isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], UnrollMetrics)
        name = f"loss={type(self.loss).__name__}"
        if not (is_pair and isinstance(made[0], Tensor) and made[0].shape == ()):
            raise InputError(
                f"{name} returns {described(made)}; return the loss, a tensor of shape (), and UnrollMetrics"
            )
        if torch.is_grad_enabled() and not made[0].requires_grad:
            raise InputError(f"{name} returns a loss without gradient; compute it without detach() or no_grad()")
        return made

    def loss_and_sums(self, batch: TttBatch) -> tuple[Float[Tensor, ""], Float[Tensor, " sums"]]:
        loss, metrics = self.compute_loss(batch)
        return loss, metrics.as_tensor()

    def _graphs_obstacle(self) -> str | None:
        """Return what in this training cannot be recorded in a CUDA graph; None if nothing."""
        if self.device_mesh is not None:
            return "trainer=fsdp gathers weights between the kernels of a step"
        own = self._own_parts()
        return f"{own[0]} is your own, and may read a batch on the host" if own else None

    def _own_parts(self) -> list[str]:
        """Return the names of what the user wrote: of head kind, loss and divergence."""
        divergence = self.loss.divergence
        parts: list[Any] = [type(self.kind), type(self.loss), type(divergence)]
        if isinstance(divergence, PlainDivergence):
            parts.append(divergence.of_logits)
        return [part.__name__ for part in parts if not part.__module__.startswith("eagle3.")]

    def _over_ranks(self, sums: np.ndarray) -> Tensor:
        """Return the sums over all ranks, in float64."""
        if self.trainer.world_size == 1:
            return torch.from_numpy(sums)
        return self.trainer.strategy.reduce(torch.tensor(sums, device=self.device), reduce_op="sum")

    def _with_loss(self, sums: Float[Tensor, " sums"], loss: Float[Tensor, ""], batch: TttBatch) -> Float[Tensor, " N"]:
        """Return sums that can be added over packs and ranks: those of the metrics, the loss, and its divisor."""
        in_step, own = self.loss.units(batch)
        return torch.cat([sums, torch.stack([loss * in_step, torch.full_like(loss, own)])])

    def _log(self, stage: str, sums: Float[Tensor, " N"]) -> dict[str, Tensor]:
        """Log loss and accept length, and loss and accuracy per TTT step; return all of them by name."""
        anchors, (trained, correct, alive, divergence) = sums[0].clamp(min=1), sums[1:-2].view(4, -1)
        by_step = {"loss": divergence / trained.clamp(min=1), "accuracy": correct / trained.clamp(min=1)}
        values = {
            f"{stage}/{name}_{step}": value
            for name, steps in by_step.items()
            for step, value in enumerate(steps.float())
        }
        values[f"{stage}/loss"] = (sums[-2] / sums[-1].clamp(min=1)).float()
        self._require_finite(f"{stage}/loss", values[f"{stage}/loss"])
        if values[f"{stage}/loss"] == 0:
            log.warning("%s/loss=0: loss=%s gives no token a weight there", stage, type(self.loss).__name__)
        values[f"{stage}/accept_length"] = accept_length(alive, anchors).float()
        self.log_dict(values, batch_size=1, sync_dist=stage == "val")
        return values

    def _require_finite(self, name: str, value: Float[Tensor, ""]) -> None:
        """Raise InputError if the training has diverged; the value is the same on all ranks."""
        if not math.isfinite(value):
            own = "".join(f", or correct {name}, which is your own" for name in self._own_parts()[:1])
            raise InputError(
                f"{name}={float(value)} at step {self.trainer.global_step}: the training has diverged, and its "
                f"checkpoints are older than that; start again with a lower optim.lr or trainer.gradient_clip_val{own}"
            )


def ranks_of_machine(trainer: lightning.Trainer) -> dist.ProcessGroup | None:
    """Return this machine's ranks if they have copies of the same weights; None for a single one, and for shards."""
    if trainer.num_devices == 1 or not isinstance(trainer.strategy, DDPStrategy):
        return None
    return dist.new_subgroups(trainer.num_devices)[0]
