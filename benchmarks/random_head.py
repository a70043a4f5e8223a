"""Heads, samples and packs of real models' shapes with random content: cost does not depend on what the numbers are.

Shapes: T tokens, H hidden size, J teacher rows, V target vocabulary, D draft vocabulary.
"""

from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor

from eagle3.data.pack import pack_samples
from eagle3.features.sample import Sample
from eagle3.features.turns import find_anchors, teacher_positions
from eagle3.head.batch import TttBatch, prepare_ttt
from eagle3.head.draft_head import DraftHead, HeadConfig

ROPE = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192}  # fmt: skip
LLAMA_8B = HeadConfig(
    num_captured_layers=3, hidden_size=4096, intermediate_size=14336, num_heads=32, num_kv_heads=8, head_dim=128,
    vocab_size=128256, draft_vocab_size=32000, rms_norm_eps=1e-5, rope_parameters=ROPE, max_position_embeddings=131072,
    fc_norm=False, norm_output=False,
)  # fmt: skip
HEADS = {  # by the target: Llama's, except Qwen's 14 B and SmolLM's 135 M
    "8b": LLAMA_8B,
    "70b": replace(LLAMA_8B, hidden_size=8192, intermediate_size=28672, num_heads=64),
    "14b": replace(LLAMA_8B, hidden_size=5120, intermediate_size=13824, num_heads=40, vocab_size=152064),
    "3b": replace(LLAMA_8B, hidden_size=3072, intermediate_size=8192, num_heads=24),
    "1b": replace(LLAMA_8B, hidden_size=2048, intermediate_size=8192, head_dim=64),
    "135m": replace(
        LLAMA_8B, hidden_size=576, intermediate_size=1536, num_heads=9, num_kv_heads=3, head_dim=64, vocab_size=49152,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0}, max_position_embeddings=8192,
    ),
}  # fmt: skip
SMALL = replace(
    LLAMA_8B, hidden_size=64, intermediate_size=96, num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=512,
    draft_vocab_size=128,
)  # fmt: skip
BLOCK_TOKENS = 1024  # random numbers are drawn for so many tokens, then repeated


def random_head(config: HeadConfig) -> DraftHead:
    return DraftHead(config, torch.arange(config.draft_vocab_size))


def whole_step(samples: list[Sample], ttt_steps: int) -> TttBatch:
    """Return the batch of an optimizer step with these samples."""
    anchors = sum(len(find_anchors(sample.turns)) for sample in samples)
    return prepare_ttt(pack_samples(samples, anchors_in_step=anchors, samples_in_step=len(samples)), ttt_steps)


class RandomSamples:
    """Samples of tokens of the draft vocabulary alone, so that every answer token is trained."""

    def __init__(self, config: HeadConfig, dtype: torch.dtype, *, seed: int) -> None:
        self.config = config
        self.generator = torch.Generator().manual_seed(seed)
        self.block = torch.randn(BLOCK_TOKENS, 3 * config.hidden_size, generator=self.generator).to(dtype)

    def sample(self, name: str, turns: Int[Tensor, " T"]) -> Sample:
        has_teacher = teacher_positions(turns)
        num_teachers = int(has_teacher.sum())
        return Sample(
            id=name,
            input_ids=torch.randint(self.config.draft_vocab_size, (len(turns),), generator=self.generator),
            turns=turns,
            aux_hidden_states=self._features(len(turns)),
            last_hidden_state=self._features(num_teachers)[:, : self.config.hidden_size].contiguous(),
            teacher_argmax=torch.randint(self.config.draft_vocab_size, (num_teachers,), generator=self.generator),
            has_teacher=has_teacher,
        )

    def documents(self, lengths: list[int], answer_share: float) -> list[Sample]:
        """A document of each length: a prompt, then one answer of that share of it."""
        turns = [answered(length, answer_share) for length in lengths]
        return [self.sample(f"p{number}", each) for number, each in enumerate(turns)]

    def pack(self, lengths: list[int], answer_share: float, *, ttt_steps: int) -> TttBatch:
        return whole_step(self.documents(lengths, answer_share), ttt_steps)

    def _features(self, rows: int) -> Tensor:
        start = int(torch.randint(BLOCK_TOKENS, (), generator=self.generator))
        return self.block[torch.arange(start, start + rows) % BLOCK_TOKENS]


def answered(length: int, answer_share: float) -> Int[Tensor, " T"]:
    return (torch.arange(length) >= length - round(length * answer_share)).long()


def ragged_lengths(tokens: int, documents: int, *, seed: int) -> list[int]:
    """Lengths that differ by up to a factor of three and sum up to `tokens`."""
    share = 0.5 + torch.rand(documents, generator=torch.Generator().manual_seed(seed))
    bounds = (share.cumsum(0) / share.sum() * tokens).round().long().tolist()
    return [end - start for start, end in zip([0, *bounds], bounds, strict=False)]
