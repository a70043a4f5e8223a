"""Random heads, samples and batches of tiny sizes, in float64 where arithmetic is compared.

Shapes: H 16, 4 query heads and 2 key/value heads of 8 channels, V 50, D 30.
"""

from typing import Any

import torch
from stores import DRAFT_VOCAB, HIDDEN, VOCAB, random_sample

from eagle3.data.pack import pack_samples
from eagle3.features.sample import Sample
from eagle3.features.turns import find_anchors
from eagle3.head.batch import TttBatch, prepare_ttt
from eagle3.head.draft_head import DraftHead, HeadConfig

EMBEDDING = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(7), dtype=torch.double)
TEACHER_HEAD = torch.randn(DRAFT_VOCAB, HIDDEN, generator=torch.Generator().manual_seed(8), dtype=torch.double)
SETTINGS: dict[str, Any] = {
    "num_captured_layers": 3,
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "draft_vocab_size": DRAFT_VOCAB,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    "max_position_embeddings": 128,
    "fc_norm": False,
    "norm_output": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def make_head(*, seed: int = 0, **changes: Any) -> DraftHead:
    torch.manual_seed(seed)
    config = HeadConfig(**SETTINGS | changes)
    draft_ids = torch.randperm(VOCAB)[: config.draft_vocab_size].sort().values
    head = DraftHead(config, draft_ids).double()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return head


def ragged_samples() -> list[Sample]:
    """One turn; two turns; answers of one and two tokens; one cut off at the end; one that starts the sample."""
    patterns = [
        [0, 0, 0, 1, 1, 1, 1, 1, 0],
        [0, 0, 1, 1, 1, 0, 0, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2],
        [0, 1, 0, 0, 2, 2, 0, 3, 3, 3],
        [0, 0, 0, 0, 1, 1, 1],
        [1, 1, 1, 1, 0],
    ]
    return [random_sample(turns, seed=number, sample_id=f"s{number}") for number, turns in enumerate(patterns)]


def ttt_batch(
    samples: list[Sample], *, ttt_steps: int, anchors_in_step: float | None = None, samples_in_step: float | None = None
) -> TttBatch:
    """Pack samples and prepare them; by default they are a whole optimizer step."""
    anchors = sum(len(find_anchors(sample.turns)) for sample in samples)
    pack = pack_samples(
        samples,
        anchors_in_step=anchors if anchors_in_step is None else anchors_in_step,
        samples_in_step=len(samples) if samples_in_step is None else samples_in_step,
    )
    return prepare_ttt(pack, ttt_steps)
