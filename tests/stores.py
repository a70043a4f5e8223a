"""Random samples and real feature stores of them, in tiny sizes; where the project's folders are.

Shapes: H 16, 4 query heads and 2 key/value heads of 8 channels, V 50, D 30.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from eagle3.features.index import ShardIndex, index_name, parse_index
from eagle3.features.manifest import MadeFrom, read_index, read_manifest, write_manifest
from eagle3.features.sample import Sample, positions_with_teacher, scaled
from eagle3.features.shards import ShardWriter, hash_made_from
from eagle3.features.source import FeatureSource
from eagle3.features.store import FeatureStore, save_target_weights
from eagle3.head.batch import TttBatch
from eagle3.storage.folder import LocalFolder, Storage
from eagle3.target.facts import TargetConfig
from eagle3.target.identity import TargetIdentity

ROOT = Path(__file__).parent.parent
ASSETS = Path(__file__).parent / "assets"
CONF = ROOT / "conf"
HIDDEN, VOCAB, DRAFT_VOCAB = 16, 50, 30


def random_sample(turns: list[int], *, seed: int = 0, stored: str = "answers", sample_id: str = "sample") -> Sample:
    """A sample whose i-th token belongs to the answer `turns[i]` (0: prompt)."""
    generator = torch.Generator().manual_seed(seed)
    length = len(turns)
    turns_tensor = torch.tensor(turns)
    has_teacher = positions_with_teacher(turns_tensor, stored)
    num_teachers = int(has_teacher.sum())
    return Sample(
        id=sample_id,
        input_ids=torch.randint(VOCAB, (length,), generator=generator),
        turns=turns_tensor,
        aux_hidden_states=torch.randn(length, 3 * HIDDEN, generator=generator, dtype=torch.double),
        last_hidden_state=torch.randn(num_teachers, HIDDEN, generator=generator, dtype=torch.double),
        teacher_argmax=torch.randint(VOCAB, (num_teachers,), generator=generator),
        has_teacher=has_teacher,
    )


IDENTITY = TargetIdentity(
    name="random",
    revision=None,
    config_hash="c",
    tokenizer_hash="t",
    template_hash="m",
    weights_hash="w",
    precision="bfloat16",
)
MADE_FROM = MadeFrom(
    target=IDENTITY,
    responses={},
    captured_by="huggingface",
    target_dtype="float32",
    capture_layers=[2, 4, 5],
    dtype="float64",
    max_length=4096,
    too_long="truncate",
    teachers="answers",
    reasoning_ids=None,
)
TARGET_CONFIG = TargetConfig(
    model_type="llama",
    num_layers=8,
    hidden_size=HIDDEN,
    vocab_size=VOCAB,
    intermediate_size=24,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    max_position_embeddings=128,
    dtype="bfloat16",
)


def write_store(path: Path, samples: list[Sample], *, shard_bytes: int = 20_000, **made_from: Any) -> Path:
    save_store(LocalFolder(path), samples, shard_bytes=shard_bytes, **made_from)
    return path


def save_store(
    storage: Storage,
    samples: list[Sample],
    *,
    shard_bytes: int = 20_000,
    target_config: TargetConfig = TARGET_CONFIG,
    **made_from: Any,
) -> None:
    """Write a real feature store, with random weights in the target's place."""
    description = replace(MADE_FROM, **made_from)
    indices = write_shards(storage, hash_made_from(description), samples, shard_bytes=shard_bytes)
    weights = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(3))
    save_target_weights(storage, weights, weights, dtype=torch.float32)
    write_manifest(storage, made_from=description, target_config=target_config, indices=indices, left_out={})


def grow_store(path: Path, samples: list[Sample]) -> None:
    """Add samples in a new shard, as the features stage does when an answer comes later."""
    storage = LocalFolder(path)
    manifest = read_manifest(storage)
    indices = [read_index(storage, index_name(shard.name)) for shard in manifest.shards]
    made_from = hash_made_from(manifest.made_from)
    indices += write_shards(storage, made_from, samples, shard_bytes=2**30, first=len(indices))
    write_manifest(
        storage, made_from=manifest.made_from, target_config=manifest.target_config, indices=indices, left_out={}
    )


def write_shards(
    storage: Storage, made_from: str, samples: list[Sample], *, shard_bytes: int, first: int = 0
) -> list[ShardIndex]:
    indices: list[ShardIndex] = []
    writer: ShardWriter | None = None
    for place, sample in enumerate(samples, start=1):
        writer = writer or ShardWriter(storage, first + len(indices))
        writer.add(sample)
        if writer.size >= shard_bytes or place == len(samples):
            content = memoryview(writer.finish(made_from))
            indices.append(parse_index(content, source=writer.name, remedy="", check_seal=False))
            writer = None
    return indices


def shard_path(store: Path, number: int) -> Path:
    """Return the tar of a shard, whose name its writer made up in part."""
    [path] = store.glob(f"shard-{number:06d}-*.tar")
    return path


def flip_a_bit(path: Path, place: int | None = None) -> None:
    """In the byte at this place of a file, or in its middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if place is None else place] ^= 1
    path.write_bytes(content)


def open_store(path: Path) -> FeatureStore:
    return FeatureStore(LocalFolder(path))


def assert_same_samples(one: FeatureSource, other: FeatureSource, *, tolerance: float) -> None:
    """The same ids, in whatever order, and up to the rounding of other batches the same features."""
    others = {ref.entry.id: ref for ref in other.samples}
    assert len(others) == len(other.samples) == len(one.samples)
    for ref in one.samples:
        ours, theirs = one.read(ref), other.read(others[ref.entry.id])
        for name in ("input_ids", "turns", "has_teacher"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), (ref.entry.id, name)
        for name in ("aux_hidden_states", "last_hidden_state"):
            left, right = getattr(ours, name), getattr(theirs, name)
            torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)


def random_samples(count: int, *, stored: str = "answers") -> list[Sample]:
    """Prompts of 1 … 6 tokens, answers of 2 … 13, every third with a second turn; features in float32."""
    samples = []
    for number in range(count):
        turns = [0] * (1 + number % 6) + [1] * (2 + number * 5 % 12)
        turns += [0, 0, 2, 2, 2] if number % 3 == 0 else [0]
        sample = random_sample(turns, seed=number, stored=stored, sample_id=f"p{number}#0")
        samples.append(in_float32(sample))
    return samples


def in_float32(sample: Sample) -> Sample:
    return replace(
        sample, aux_hidden_states=sample.aux_hidden_states.float(), last_hidden_state=sample.last_hidden_state.float()
    )


def in_fp8(sample: Sample) -> Sample:
    rows: Any = sample
    aux, last = scaled(rows.aux_hidden_states, 3), scaled(rows.last_hidden_state, 1)
    return replace(sample, aux_hidden_states=aux, last_hidden_state=last)


def with_last_in_float32(batch: TttBatch) -> TttBatch:
    return replace(batch, pack=replace(batch.pack, last_hidden_state=batch.pack.last_hidden_state.float()))
