"""The head of speculators' defaults, whose layer adds to its normed state, as a kind of one's own for `compare`."""

from jaxtyping import Float, Int
from torch import Tensor

from eagle3.head.draft_head import DraftHead, HeadConfig
from eagle3.head.eagle3 import Eagle3


class NormedResidualHead(DraftHead):
    def output(self, hidden: Float[Tensor, "R H"], attended: Float[Tensor, "R Q C"]) -> Float[Tensor, "R H"]:
        return super().output(self.midlayer.hidden_norm(hidden), attended)


class NormedResidual(Eagle3):
    def new_head(self, config: HeadConfig, draft_ids: Int[Tensor, " D"]) -> DraftHead:
        return NormedResidualHead(config, draft_ids)
