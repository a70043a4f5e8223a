"""SpecForge's training step on this project's samples, for race.py: its own classes, imported from its tree.

Model, loss, teacher, optimizer and export are SpecForge's; neither FSDP nor its loader costs it time here. Of its
requirements these modules need torch, transformers, huggingface_hub, safetensors and triton alone.

Shapes: T tokens of a pack, B rows and L tokens of a row as SpecForge trains them, H hidden size.
"""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from specforge.algorithms.eagle3 import model as eagle3_model
from specforge.core.loss import _compute_loss
from specforge.export.checkpoint_io import apply_legacy_rope_scaling
from specforge.modeling.auto import AutoDraftModel, AutoDraftModelConfig
from specforge.modeling.draft import llama3_eagle
from specforge.modeling.target.target_head import TargetHead
from specforge.optimizer import BF16Optimizer
from specforge.runtime.contracts import TrainBatch
from specforge.training.strategies.base import Eagle3TrainStrategy
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks
from torch.nn.functional import pad

from eagle3.data.pack import Pack, pack_samples
from eagle3.features.sample import Sample
from eagle3.head.draft_head import DraftHead
from eagle3.head.draft_vocab import membership, to_offsets
from eagle3.head_files.format import exported_config
from eagle3.storage.files import write_json

mask_of_tokens = llama3_eagle.generate_eagle3_mask  # before it is narrowed to documents


@dataclass(frozen=True)
class Part:
    """What one forward takes, and the document of each token where several lie in a row."""

    batch: TrainBatch
    documents: Int[Tensor, " L"] | None = None


class SpecForge:
    """SpecForge's EAGLE-3 for a target, of the shape and draft vocabulary of `head`, a plain EAGLE-3 head.

    `layout` is how documents become rows: `alone`, one after the other into one optimizer step, as its examples with
    accumulation; `padded`, as by its collator; `joined`, side by side in one row. For that, which SpecForge does not
    have at commit a6b6b02, its attention mask is narrowed to documents: the loss is that of the other two. `row_tokens`
    fills rows up with padding, so that nothing is compiled again.
    """

    def __init__(
        self,
        head: DraftHead,
        embedding: Float[Tensor, "V H"],
        lm_head: Float[Tensor, "V H"],
        *,
        capture_layers: list[int],
        ttt_steps: int,
        total_steps: int,
        lr: float,
        layout: str,
        compact_teacher: bool,
        row_tokens: int | None,
        device: torch.device,
        first_chain: bool = False,
    ) -> None:
        self.layout, self.row_tokens, self.device, self.first_chain = layout, row_tokens, device, first_chain
        self.documents: Int[Tensor, " L"] | None = None
        on_gpu = device.type == "cuda"
        self.dtype = torch.bfloat16 if on_gpu else torch.float32
        backend = "flex_attention" if on_gpu else "sdpa"  # its default, which has no backward on a CPU
        config = exported_config(head.config, capture_layers, "bfloat16")
        with tempfile.TemporaryDirectory() as folder, device:
            write_json(Path(folder) / "config.json", config | {"pad_token_id": 0})
            draft_config = AutoDraftModelConfig.from_file(f"{folder}/config.json")
            self.draft = AutoDraftModel.from_config(draft_config, attention_backend=backend, torch_dtype=self.dtype)
            target_head = TargetHead(folder)
        self.draft.to(device)
        ids = head.draft_ids.cpu()
        with torch.no_grad():
            self.draft.embed_tokens.weight.copy_(embedding)
            self.draft.t2d.copy_(membership(ids, head.config.vocab_size))
            self.draft.d2t.copy_(to_offsets(ids))
            target_head.fc.weight.copy_(lm_head)
        self.draft.freeze_embedding()
        target_head.freeze_weights()
        model = eagle3_model.OnlineEagle3Model(self.draft, length=ttt_steps, attention_backend=backend)
        self.strategy = Eagle3TrainStrategy(
            model, target_head=target_head.eval().to(device, self.dtype), compact_teacher=compact_teacher
        )
        self.optimizer = BF16Optimizer(self.draft, lr=lr, total_steps=total_steps)
        if layout == "joined":
            llama3_eagle.generate_eagle3_mask = self._mask_within_documents
        if not on_gpu:  # its loss is a Triton kernel, next to its reference
            eagle3_model.LogSoftmaxLoss = type("PlainLoss", (), {"apply": staticmethod(_compute_loss)})

    def batch(self, samples: list[Sample]) -> list[Part]:
        """Return what `step` takes, on the device."""
        pack = pack_samples(samples, anchors_in_step=1, samples_in_step=1).to(self.device)
        has_teacher = torch.cat([sample.has_teacher for sample in samples]).to(self.device)
        tensors = self._tensors(pack, has_teacher)
        lengths = [len(sample.input_ids) for sample in samples]
        if self.layout == "joined":
            row = max(self.row_tokens or 0, sum(lengths))
            documents = torch.repeat_interleave(torch.arange(len(samples)), torch.tensor(lengths)).to(self.device)
            return [Part(train_batch([tensors], row), pad(documents, (0, row - len(documents)), value=-1))]
        columns = [tensor.split(lengths) for tensor in tensors.values()]
        split = [dict(zip(tensors, row, strict=True)) for row in zip(*columns, strict=True)]
        if self.layout == "padded":
            return [Part(train_batch(split, max(lengths)))]
        return [Part(train_batch([each], length)) for each, length in zip(split, lengths, strict=True)]

    def step(self, parts: list[Part]) -> None:
        """Forward, backward and optimizer step."""
        for loss in self.losses(parts):
            (loss / len(parts)).backward()
        self.optimizer.step()

    def losses(self, parts: list[Part]) -> Iterator[Float[Tensor, ""]]:
        for part in parts:
            self.documents = part.documents
            yield self.strategy.forward_loss(part.batch).loss

    def save(self, folder: Path) -> None:
        """Write the head as SpecForge's exporter for SGLang does."""
        weights = {name: tensor for name, tensor in self.draft.state_dict().items() if "embed" not in name}
        self.draft.save_pretrained(folder, state_dict=weights)
        apply_legacy_rope_scaling(str(folder))

    def _tensors(self, pack: Pack, has_teacher: Tensor) -> dict[str, Tensor]:
        """What it reads from its files, token by token.

        Its mask marks answer tokens x_t; their loss asks for the teacher at t + 1, which the store has but behind an
        answer's end: those tokens are left out."""
        target = torch.zeros(len(has_teacher), pack.last_hidden_state.shape[1], dtype=self.dtype, device=self.device)
        target[has_teacher] = pack.last_hidden_state.to(self.dtype)
        trained = pack.turns > 0
        if self.first_chain:
            trained |= pad(trained[1:], (0, 1))
        return {
            "input_ids": pack.input_ids,
            "loss_mask": (trained & pad(has_teacher[1:], (0, 1))).long(),
            "attention_mask": torch.ones_like(pack.input_ids),
            "position_ids": pack.positions,
            "hidden_state": pack.aux_hidden_states.to(self.dtype),
            "target": target,
        }

    def _mask_within_documents(self, **sizes: Any) -> Callable[..., Tensor]:
        theirs, documents, length = mask_of_tokens(**sizes), self.documents, sizes["Q_LEN"]
        assert documents is not None

        def same_document(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return documents[query] == documents[key % length]

        mask = and_masks(theirs, same_document)
        mask.__name__ = theirs.__name__
        return mask


def train_batch(rows: list[dict[str, Tensor]], length: int) -> TrainBatch:
    """Pad rows with zeros on the right to (B, `length`), as SpecForge's collator does."""
    tensors = {
        name: torch.stack(
            [pad(row[name], (0, 0) * (row[name].ndim - 1) + (0, length - len(row[name]))) for row in rows]
        )
        for name in rows[0]
    }
    return TrainBatch([str(row) for row in range(len(rows))], "eagle3", tensors, {"target_repr": "hidden_state"})
