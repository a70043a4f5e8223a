"""What every draft head has: sizes from its target, a draft vocabulary, and the norm and `lm_head` that give logits.

Shapes: any leading dimensions R; H hidden size, V target and D draft vocabulary.
"""

from dataclasses import MISSING, dataclass, fields
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from eagle3.errors import InputError
from eagle3.storage.records import Record
from eagle3.target.facts import TargetConfig

AnyConfig = TypeVar("AnyConfig", bound="HeadSizes")


@dataclass(frozen=True, kw_only=True)
class HeadSizes(Record):
    """The sizes that a head takes from its target and the features; a subclass adds the settings of its kind."""

    num_captured_layers: int
    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float

    @classmethod
    def for_target(cls: type[AnyConfig], target: TargetConfig, **settings: Any) -> AnyConfig:
        """Take values that are missing in `settings`, or None, from the target; options of the head default to off."""
        given = {name: value for name, value in settings.items() if value is not None}
        shared = {field.name for field in fields(cls)} & {field.name for field in fields(target)}
        values = {name: getattr(target, name) for name in shared} | given
        for each in fields(cls):
            if each.name not in values and each.default is each.default_factory is MISSING:
                raise InputError(f"model.{each.name} is not set; {cls.__name__} has no default for it, so give a value")
        return cls(**values)


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32, returned in the input's dtype (nn.RMSNorm warns on mixed dtypes)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        return functional.rms_norm(wide, self.weight.shape, self.weight.to(wide.dtype), self.eps).to(x.dtype)


class Head(nn.Module):
    """Base of draft heads. A subclass makes `norm` and `lm_head`, which the losses use, next to its own modules.

    State-dict names are those of the exported checkpoint; `draft_ids` [D] becomes d2t and t2d there."""

    kind: str  # name of the kind that made it (registry.py)
    config: Any  # of the kind's `config_type`
    draft_ids: Int[Tensor, " D"]
    norm: RMSNorm
    lm_head: nn.Linear

    def __init__(self, config: HeadSizes, draft_ids: Int[Tensor, " D"]) -> None:
        super().__init__()
        assert draft_ids.shape == (config.draft_vocab_size,)
        self.config = config
        self.register_buffer("draft_ids", draft_ids)

    def logits(self, hidden: Float[Tensor, "*R H"]) -> Float[Tensor, "*R D"]:
        return self.lm_head(self.norm(hidden))
