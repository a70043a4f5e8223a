"""Which kernels run a training: one plan, chosen once."""

from dataclasses import dataclass

from eagle3.head.attention import MakeAttention, PaddedAttention
from eagle3.head.layer import MakeLayer, PlainLayer


@dataclass(frozen=True)
class KernelPlan:
    attention: MakeAttention = PaddedAttention
    layer: MakeLayer = PlainLayer
