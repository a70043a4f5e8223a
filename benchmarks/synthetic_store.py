"""A feature store of a real target's shape and random content, to measure training end to end without a target.

    python benchmarks/synthetic_store.py --out DIR --gigabytes 40
    python train.py trainer=gpu data.path=DIR data.pack_tokens=16384 trainer.max_epochs=1    # log: tokens/s, data wait

Written by the store's own writer: shards, indices, hashes and manifest are real, only the numbers are random.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from pathlib import Path

import torch
from random_head import SHAPES, RandomSamples, answered
from tqdm import tqdm

from eagle3.errors import InputError
from eagle3.features.fp8 import scaled
from eagle3.features.index import ShardIndex
from eagle3.features.manifest import MadeFrom, Manifest, write_manifest
from eagle3.features.sample import Sample, stored_size
from eagle3.features.shards import write_shards
from eagle3.features.store import TARGET_WEIGHTS, save_target_weights
from eagle3.head.draft_head import HeadConfig
from eagle3.storage.folder import LocalFolder, Storage, sha256_stored
from eagle3.target.facts import TargetConfig
from eagle3.target.identity import TargetIdentity

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MADE_FROM = MadeFrom(
    target=TargetIdentity(
        name="random",
        revision=None,
        config_hash="random",
        tokenizer_hash="random",
        template_hash="random",
        weights_hash="random",
    ),
    responses={},
    captured_by="nobody",
    target_dtype="bfloat16",
    capture_layers=[2, 16, 29],
    dtype="bfloat16",
    max_length=1 << 20,
    too_long="truncate",
    teachers="answers",
    reasoning_ids=None,
)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="an empty or new folder")
    parser.add_argument("--gigabytes", type=float, default=40)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--tokens", type=int, default=2048, help="of a sample on average; half to one and a half of it")
    parser.add_argument("--answer-share", type=float, default=0.5, help="on average; a half to one and a half of it")
    parser.add_argument("--dtype", choices=["bfloat16", "fp8"], default="bfloat16")
    parser.add_argument("--shard-mb", type=float, default=512)
    options = parser.parse_args(arguments)
    if options.out.exists() and any(options.out.iterdir()):
        raise InputError(f"--out={options.out} is not empty; name a new folder")
    shape, storage = SHAPES[options.shape], LocalFolder(options.out)
    samples = random_samples(shape, int(options.gigabytes * 1e9), options.tokens, options.answer_share, options.dtype)
    manifest = write_store(storage, shape, samples, shard_bytes=options.shard_mb * 2**20, dtype=options.dtype)
    print(f"{manifest.samples} samples, {manifest.tokens} tokens, {manifest.bytes / 1e9:.2f} GB in {options.out}")


def write_store(
    storage: Storage,
    shape: HeadConfig,
    samples: Iterable[Sample],
    *,
    shard_bytes: float,
    dtype: str = MADE_FROM.dtype,
) -> Manifest:
    """Write a store that says it is of a random target of the head's sizes."""
    made_from = replace(MADE_FROM, dtype=dtype)
    indices = write_shards(storage, made_from, samples, shard_bytes=shard_bytes)
    write_target(storage, shape)
    return finish_store(storage, shape, indices, made_from)


def finish_store(
    storage: Storage, shape: HeadConfig, indices: list[ShardIndex], made_from: MadeFrom = MADE_FROM
) -> Manifest:
    return write_manifest(
        storage,
        made_from=made_from,
        target_config=target_config(shape),
        target_weights_sha256=sha256_stored(storage, TARGET_WEIGHTS),
        indices=indices,
        left_out={},
    )


def random_samples(shape: HeadConfig, num_bytes: int, tokens: int, answer_share: float, dtype: str) -> Iterator[Sample]:
    """Yield samples until they are `num_bytes` together."""
    samples = RandomSamples(shape, torch.bfloat16, seed=0)
    generator = torch.Generator().manual_seed(1)
    number = written = 0
    with tqdm(total=num_bytes, unit="B", unit_scale=True, desc="random features") as progress:
        while written < num_bytes:
            length, share = (0.5 + torch.rand(2, generator=generator)).tolist()
            sample = samples.sample(
                f"p{number}#0", answered(max(8, round(tokens * length)), min(1, answer_share * share))
            )
            if dtype == "fp8":
                sample = replace(
                    sample,
                    aux_hidden_states=scaled(sample.aux_hidden_states.to(DEVICE), 3).cpu(),
                    last_hidden_state=scaled(sample.last_hidden_state.to(DEVICE), 1).cpu(),
                )
            yield sample
            size = stored_size(sample)
            number, written = number + 1, written + size
            progress.update(size)


def write_target(storage: Storage, shape: HeadConfig) -> None:
    generator = torch.Generator().manual_seed(2)
    size = (shape.vocab_size, shape.hidden_size)
    embedding, lm_head = (torch.randn(size, generator=generator, dtype=torch.bfloat16) for _ in range(2))
    save_target_weights(storage, embedding, lm_head, dtype=torch.bfloat16)


def target_config(shape: HeadConfig) -> TargetConfig:
    """Describe a target of the head's sizes."""
    shared = {field.name for field in fields(TargetConfig)} & {field.name for field in fields(shape)}
    of_head = {name: getattr(shape, name) for name in shared}
    return TargetConfig(**of_head, model_type="llama", num_layers=32, dtype="bfloat16")


if __name__ == "__main__":
    main(sys.argv[1:])
