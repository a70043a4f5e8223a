"""A feature store of random content in fp8, for rates of train.py on a head of some target's size.

    python benchmarks/random_store.py DIR --head 135m --tokens 900000
    python train.py data.path=DIR trainer.max_steps=400 data.pack_tokens=8192     # train/tokens_per_s in metrics.csv

Documents have 150 to 899 tokens, of which 40 to 90 % are an answer.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch
from random_head import HEADS, SMALL, RandomSamples, answered

from eagle3.features.index import parse_index
from eagle3.features.manifest import MadeFrom, write_manifest
from eagle3.features.sample import scaled
from eagle3.features.shards import ShardWriter, hash_of
from eagle3.features.store import save_target_weights
from eagle3.storage.folder import LocalFolder
from eagle3.target.facts import TargetConfig
from eagle3.target.identity import TargetIdentity

SHARD_BYTES = 250_000_000
TARGET = TargetIdentity(
    name="random",
    revision=None,
    config_hash="",
    tokenizer_hash="",
    template_hash="",
    weights_hash="",
    precision="bfloat16",
)
MADE_FROM = MadeFrom(
    target=TARGET, responses={}, capture_layers=[2, 4, 5], captured_by="huggingface", target_dtype="bfloat16",
    dtype="fp8", max_length=4096, too_long="truncate", teachers="answers", reasoning_ids=None,
)  # fmt: skip


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--head", choices=[*HEADS, "small"], default="8b", help="of a target of that size")
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0, help="another for each of several stores of a training")
    options = parser.parse_args(arguments)
    shape = HEADS.get(options.head, SMALL)
    options.folder.mkdir(parents=True, exist_ok=True)
    storage, draw = LocalFolder(options.folder), torch.Generator().manual_seed(options.seed + 1)
    samples = RandomSamples(replace(shape, draft_vocab_size=shape.vocab_size), torch.bfloat16, seed=options.seed)
    writer, indices, tokens, number = ShardWriter(storage, 0), [], 0, 0
    while tokens < options.tokens:
        length = int(torch.randint(150, 900, (), generator=draw))
        turns = answered(length, 0.4 + 0.5 * float(torch.rand((), generator=draw)))
        sample = samples.sample(f"p{number}#0", turns)
        aux = scaled(sample.aux_hidden_states, shape.num_captured_layers)
        writer.add(replace(sample, aux_hidden_states=aux, last_hidden_state=scaled(sample.last_hidden_state, 1)))
        tokens, number = tokens + length, number + 1
        if writer.size > SHARD_BYTES or tokens >= options.tokens:
            content = memoryview(writer.finish(hash_of(MADE_FROM)))
            indices.append(parse_index(content, source=writer.name, remedy="", check_seal=False))
            writer = ShardWriter(storage, len(indices))
    writer.discard()
    weights = torch.randn(shape.vocab_size, shape.hidden_size, generator=draw).bfloat16()
    save_target_weights(storage, weights, weights, dtype=torch.bfloat16)
    target = TargetConfig(
        model_type="llama", num_layers=8, hidden_size=shape.hidden_size, vocab_size=shape.vocab_size,
        intermediate_size=shape.intermediate_size, num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim, rms_norm_eps=shape.rms_norm_eps, rope_parameters=shape.rope_parameters,
        max_position_embeddings=shape.max_position_embeddings, dtype="bfloat16",
    )  # fmt: skip
    write_manifest(storage, made_from=MADE_FROM, target_config=target, indices=indices, left_out={})
    print(f"{options.folder}: {number} samples, {tokens} tokens")


if __name__ == "__main__":
    main(sys.argv[1:])
