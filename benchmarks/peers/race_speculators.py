"""speculators' EAGLE-3 training on this project's samples, for race.py, with version 0.9 of its package.

Model, verifier's weights, loss, optimizers, schedule, shift of a sample and collation of a pack are those of the
package, as `speculators train` puts them together; a setting that is not named here has its default. This project gives
the samples, the packs, their order and the draft vocabulary.

Its defaults are K = 3 unrolled steps, norms before the residual, before fc and on the output, a window of 2,048 tokens
and rows of 8,192 tokens; `build_train_config` makes the plain EAGLE-3 head from them, with attention to the whole text.
K and the length of rows are those of the run. As in its own code the head's lm_head stays what it begins as, the
target's rows of the draft vocabulary.

The store has final-normed states, so the verifier's final norm, which comes before its lm_head, is left out. Its loss
wants the teacher of each answer token; the store has none for the last token of an answer, which is left out.

Shapes: T tokens of a sample, J of them with a teacher, A captured layers, H hidden size.
"""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from safetensors.torch import save_file
from speculators.models.eagle3 import Eagle3DraftModel, shift_batch
from speculators.train.cli import create_transformer_layer_config
from speculators.train.config import TrainConfig
from speculators.train.data import CollateFn
from speculators.train.trainer import Trainer, TrainerConfig
from torch import Tensor, nn
from train_step import device, on_gpu
from transformers import LlamaConfig

from eagle3.data.pack import pack_samples
from eagle3.features.sample import Sample
from eagle3.head.draft_head import DraftHead, HeadConfig
from eagle3.head.draft_vocab import membership, to_offsets
from eagle3.head.eagle3 import OPTIONS
from eagle3.head_files.format import save_head
from eagle3.settings.training import TrainRun

BLOCK = 128  # of flex_attention's masks: a row has a multiple of so many tokens


class Steps(Trainer):
    """Its trainer's optimizers and schedules for a model, without its loop, loader and checkpoints."""

    def __init__(self, model: nn.Module, config: TrainerConfig) -> None:
        self.model, self.config, self.resume_from_checkpoint = model, config, False
        self.train_loader: list[Any] = []  # its length is not asked for: `config` has the number of steps
        self.setup_optimizer()

    def __call__(self, loss: Tensor) -> None:
        """Backward, clipping, optimizers and schedules in the order of its loop."""
        self._optimizers_zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizers_step()
        self._schedulers_step()


class Speculators:
    """Its EAGLE-3 model and training for a target, with the sizes and draft vocabulary of `head`."""

    def __init__(
        self, head: DraftHead, target: Path, capture_layers: list[int], settings: TrainConfig, *,
        row_tokens: int | None, total_steps: int,
    ) -> None:  # fmt: skip
        self.head, self.capture_layers, self.total_steps = head.config, capture_layers, total_steps
        self.draft_ids = head.draft_ids.cpu()
        self.settings = settings.flatten() | {
            "verifier_name_or_path": str(target),
            "target_layer_ids": capture_layers,
            "draft_vocab_size": len(self.draft_ids),
        }
        shape = create_transformer_layer_config(
            verifier_name_or_path=str(target), num_layers=self.settings["num_layers"],
            draft_arch=self.settings["draft_arch"], hidden_act=self.settings["draft_hidden_act"],
            sliding_window=self.settings["sliding_window"],
            full_attention_indices=self.settings["full_attention_indices"],
        )  # fmt: skip
        require_same_sizes(shape, head.config)
        self.model = Eagle3DraftModel.from_training_args(
            shape, t2d=membership(self.draft_ids, head.config.vocab_size), d2t=to_offsets(self.draft_ids),
            **self.settings,
        )  # fmt: skip
        self.model.verifier_norm = nn.Identity()  # the store's states have passed it
        self.model.to(device()).train()
        self.dtype = getattr(torch, self.settings["hidden_states_dtype"]) if on_gpu() else torch.float32
        self.row_tokens = row_tokens  # rows are filled up to so many, as its loader does; None: to whole blocks
        self.arguments, _ = Eagle3DraftModel.get_trainer_kwargs(**self.settings)
        self.first = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self.begin()

    def begin(self) -> None:
        """Return to the first weights, with fresh optimizers and schedules."""
        self.model.load_state_dict(self.first)
        names = {name: self.settings[name] for name in TrainerConfig._fields if name in self.settings}
        config = TrainerConfig(
            num_epochs=self.settings["epochs"],
            **names | {"hidden_states_dtype": self.dtype, "scheduler_total_steps": self.total_steps},
        )
        self.steps = Steps(self.model, config)

    def batch(self, samples: list[Sample]) -> dict[str, Any]:
        """Return a pack as its model takes it, on the device."""
        pack = pack_samples(samples, anchors_in_step=1, samples_in_step=1).to(device())
        has_teacher = torch.cat([sample.has_teacher for sample in samples]).to(device())
        last = torch.zeros(len(has_teacher), self.head.hidden_size, dtype=self.dtype, device=device())
        last[has_teacher] = pack.last_hidden_state.to(self.dtype)
        columns = {
            "hidden_states": pack.aux_hidden_states.to(self.dtype),
            "input_ids": pack.input_ids,
            "verifier_last_hidden_states": last,
            "loss_mask": (pack.turns > 0) & has_teacher,
            "position_ids": pack.positions.to(device()),
        }
        lengths = [len(sample.input_ids) for sample in samples]
        rows = zip(*(column.split(lengths) for column in columns.values()), strict=True)
        parts = [
            dict(zip(columns, row, strict=True)) | {"lengths": torch.tensor([length])}
            for row, length in zip(rows, lengths, strict=True)
        ]
        row = -(-(self.row_tokens or sum(lengths)) // BLOCK) * BLOCK
        collated = CollateFn(row, self.head.hidden_size, len(self.capture_layers), self.dtype, shift_batch)(parts)
        return {name: value.to(device()) for name, value in collated.items() if isinstance(value, Tensor)}

    def loss(self, batch: dict[str, Any]) -> Tensor:
        with torch.autocast(device().type, self.dtype, enabled=on_gpu()):
            _, loss, _ = self.model(**batch, **self.arguments)
        return loss

    def step(self, batch: dict[str, Any]) -> None:
        self.steps(self.loss(batch))

    def exported(self) -> DraftHead:
        """Return the head as this project's decoder runs it; every tensor of either must have its place."""
        head = DraftHead(replace(self.head, **{name: self.settings[name] for name in OPTIONS}), self.draft_ids)
        named = {
            name.replace("layers.0.", "midlayer.", 1): tensor.detach().cpu()
            for name, tensor in self.model.named_parameters()
            if not name.startswith(("embed_tokens.", "verifier_"))
        }
        rest = {name: tensor for name, tensor in head.state_dict().items() if name not in dict(head.named_parameters())}
        head.load_state_dict(named | rest)
        return head

    def save(self, folder: Path) -> None:
        """Write the head in SGLang's format."""
        save_head(folder, self.exported(), self.capture_layers, "bfloat16")


def build_train_config(lr: float, run: TrainRun, *, defaults: bool) -> TrainConfig:
    """Return its settings for this run: its defaults, or what makes them the plain head (top of the file)."""
    loss, attention = ("fused", "simple_flex_attention") if on_gpu() else ("eager", "sdpa")
    norms = dict.fromkeys(("norm_before_residual", "norm_before_fc", "norm_output"), False)
    plain = {**norms, "full_attention_indices": [0]}
    epochs = run.trainer.keys["max_epochs"]
    return TrainConfig(
        speculator_type="eagle3", seed=run.seed, optimizer={"lr": lr}, trainer={"epochs": epochs},
        draft={"draft_attn_impl": attention, **({} if defaults else plain)},
        loss={"ttt_steps": run.ttt_steps, "loss_implementation": loss},
    )  # fmt: skip


def of_random_target(head: DraftHead, capture_layers: list[int], run: TrainRun, total_steps: int) -> Speculators:
    """Return what race.py times: a target of the head's sizes, whose embedding and lm_head are random numbers."""
    prepare_compiler()
    shape = head.config
    with tempfile.TemporaryDirectory() as folder:
        LlamaConfig(
            hidden_size=shape.hidden_size, intermediate_size=shape.intermediate_size, num_hidden_layers=32,
            num_attention_heads=shape.num_heads, num_key_value_heads=shape.num_kv_heads, head_dim=shape.head_dim,
            vocab_size=shape.vocab_size, rms_norm_eps=shape.rms_norm_eps, rope_parameters=dict(shape.rope_parameters),
            max_position_embeddings=shape.max_position_embeddings, dtype=torch.bfloat16,
        ).save_pretrained(folder)  # fmt: skip
        rows = torch.randn(shape.vocab_size, shape.hidden_size, dtype=torch.bfloat16)
        rows[shape.draft_vocab_size :] /= 2  # no teacher's first choice, as for SpecForge
        names = ("model.embed_tokens.weight", "lm_head.weight")
        tensors = {name: rows.clone() for name in names} | {"model.norm.weight": torch.ones(shape.hidden_size)}
        save_file(tensors, f"{folder}/model.safetensors")
        settings = build_train_config(1e-3, run, defaults=False)
        contestant = Speculators(head, Path(folder), capture_layers, settings, row_tokens=None, total_steps=total_steps)
    return contestant


def require_same_sizes(shape: Any, head: HeadConfig) -> None:
    """Stop if its layer has another size than ours: then the heads would not be comparable."""
    pairs = {
        "hidden_size": head.hidden_size, "intermediate_size": head.intermediate_size,
        "num_attention_heads": head.num_heads, "num_key_value_heads": head.num_kv_heads, "head_dim": head.head_dim,
        "vocab_size": head.vocab_size, "rms_norm_eps": head.rms_norm_eps,
    }  # fmt: skip
    differing = {name: (getattr(shape, name), ours) for name, ours in pairs.items() if getattr(shape, name) != ours}
    rope = {name: shape.rope_parameters.get(name) for name in ("rope_type", "rope_theta")}
    expected = {name: head.rope_parameters.get(name) for name in rope}
    if differing or rope != expected:
        raise SystemExit(f"its head has other sizes than ours: {differing}, RoPE {rope} and {expected}")


def prepare_compiler() -> None:
    torch._dynamo.config.recompile_limit = 64  # so that no frame falls back to eager silently
    torch._dynamo.config.disable = not on_gpu()
    separate_autotuned_lists()


def separate_autotuned_lists() -> None:
    """Give each of its autotuned kernels lists of its own. With torch 2.11 Dynamo refuses two kernels that share one:
    "already tracked for mutation"."""
    if on_gpu():
        from speculators.losses import fused

        for kernel in (fused.loss_forward_kernel, fused.loss_backward_kernel):
            for name, value in vars(kernel).items():
                if isinstance(value, list):
                    setattr(kernel, name, list(value))
