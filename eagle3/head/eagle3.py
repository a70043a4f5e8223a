"""EAGLE-3 (arXiv:2503.01840) and EAGLE-3.1 (arXiv:2605.09992) as a kind of head.

Shapes: R anchors, H hidden size, V target and D draft vocabulary.
"""

from jaxtyping import Float, Int
from torch import Tensor

from eagle3.data.pack import Pack
from eagle3.head.batch import TttBatch, prepare_ttt
from eagle3.head.draft_head import DraftHead, HeadConfig
from eagle3.head.kernels import KernelPlan
from eagle3.head.kind import register
from eagle3.head.unroll import unroll


class Eagle3:
    """One Llama layer over fused captured states, trained by the training-time test."""

    name = HeadConfig.KIND
    config_type = HeadConfig

    def new_head(self, config: HeadConfig, draft_ids: Int[Tensor, " D"]) -> DraftHead:
        return DraftHead(config, draft_ids)

    def prepare(self, pack: Pack, ttt_steps: int) -> TttBatch:
        return prepare_ttt(pack, ttt_steps)

    def unroll(
        self, head: DraftHead, embedding: Float[Tensor, "V H"], batch: TttBatch, ttt_steps: int, kernels: KernelPlan
    ) -> list[Float[Tensor, "R H"]]:
        return unroll(head, embedding, batch, ttt_steps, kernels.attention, kernels.layer)


register(Eagle3())
