"""Random samples and real feature stores of them, in tiny sizes; where the project's folders are.

Shapes: H 16, 4 query heads and 2 key/value heads of 8 channels, V 50, D 30.
"""

from pathlib import Path

import torch

from eagle3.features.sample import Sample, rows_with_teacher
from eagle3.features.shards import StoreWriter
from eagle3.features.store import save_target_weights, write_manifest

ROOT = Path(__file__).parent.parent
ASSETS = Path(__file__).parent / "assets"
CONF = ROOT / "conf"
HIDDEN, VOCAB, DRAFT_VOCAB = 16, 50, 30


def random_sample(turns: list[int], *, seed: int = 0, stored: str = "answers", sample_id: str = "sample") -> Sample:
    """A sample whose i-th token belongs to the answer `turns[i]` (0: prompt)."""
    generator = torch.Generator().manual_seed(seed)
    length = len(turns)
    turns_tensor = torch.tensor(turns)
    rows = rows_with_teacher(turns_tensor, stored)
    num_teachers = int(rows.sum())
    return Sample(
        id=sample_id,
        input_ids=torch.randint(VOCAB, (length,), generator=generator),
        turns=turns_tensor,
        aux=torch.randn(length, 3 * HIDDEN, generator=generator, dtype=torch.double),
        last=torch.randn(num_teachers, HIDDEN, generator=generator, dtype=torch.double),
        argmax=torch.randint(VOCAB, (num_teachers,), generator=generator),
        logsumexp=torch.randn(num_teachers, generator=generator),
        teacher_rows=rows,
    )


MADE_FROM = {
    "target": {"name": "random", "config_hash": "c", "tokenizer_hash": "t", "template_hash": "m", "weights_hash": "w"},
    "capture_layers": [2, 4, 5],
    "teacher_rows": "answers",
    "reasoning_ids": None,
}
TARGET_CONFIG = {
    "hidden_size": HIDDEN,
    "vocab_size": VOCAB,
    "intermediate_size": 24,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    "max_position_embeddings": 128,
    "dtype": "bfloat16",
}


def write_store(path: Path, samples: list[Sample], *, shard_bytes: int = 20_000, **made_from: object) -> Path:
    """A real feature store of random features."""
    path.mkdir(parents=True, exist_ok=True)
    indices: list[dict] = []
    description = MADE_FROM | made_from
    writer = StoreWriter(path, description, indices, shard_bytes=shard_bytes)
    for sample in samples:
        writer.add(sample)
    writer.close_shard()
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(VOCAB, HIDDEN, generator=generator)
    save_target_weights(path / "target.safetensors", weights, weights, dtype=torch.float32)
    write_manifest(path, made_from=description, target_config=TARGET_CONFIG, indices=indices, left_out={})
    return path


def random_samples(count: int) -> list[Sample]:
    """Prompts of 1 … 6 tokens, answers of 2 … 13, every third with a second turn; features in float32."""
    samples = []
    for number in range(count):
        turns = [0] * (1 + number % 6) + [1] * (2 + number * 5 % 12)
        turns += [0, 0, 2, 2, 2] if number % 3 == 0 else [0]
        sample = random_sample(turns, seed=number, sample_id=f"p{number}#0")
        samples.append(Sample(**{**vars(sample), "aux": sample.aux.float(), "last": sample.last.float()}))
    return samples
