"""The feature store: shards, their manifest, and the target's embedding and lm_head.

    manifest.json         what made the store: target, template, capture, dtype, counts; sha256 of every shard
    target.safetensors    embedding [V, H] and lm_head [V, H] (one tensor if tied)
    shard-*.tar, *.json   samples (shards.py)

Shapes: V target vocabulary, H hidden size.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from eagle3.errors import InputError
from eagle3.features.sample import Sample
from eagle3.features.shards import SampleEntry, ShardReader, broken, verify_file
from eagle3.storage import read_json, sha256_file, sha256_json, write_json

FORMAT_VERSION = 2
TARGET_WEIGHTS = "target.safetensors"
MAKE_STORE = "python precompute.py target.path=TARGET prompts.path=FILE.jsonl out_dir=DIR (then data.path=DIR/features)"


@dataclass(frozen=True)
class SampleRef:
    """A sample: the folder of its store, its shard and its entry there."""

    store: Path
    shard: str
    entry: SampleEntry


class FeatureStore:
    """Opens a store; nothing but the manifest and the indices is read until samples are."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.manifest = read_json(self.path / "manifest.json", made_by=MAKE_STORE)
        if self.manifest.get("format_version") != FORMAT_VERSION:
            raise InputError(
                f"data.path={path} has format_version {self.manifest.get('format_version')}, this code reads "
                f"{FORMAT_VERSION}; make the store again with precompute.py stages=[features]"
            )
        self.samples = [ref for shard in self.manifest["shards"] for ref in self._samples_of(shard)]
        self._readers: dict[str, ShardReader] = {}

    @property
    def absolute_path(self) -> str:
        return str(self.path.resolve())

    def read(self, ref: SampleRef) -> Sample:
        return self._reader(ref.shard).read(ref.entry)

    def verify(self, *, rank: int = 0, world_size: int = 1) -> None:
        """Compare this rank's share of the shards with their hashes; an InputError names the first that differs."""
        shards = self.manifest["shards"][rank::world_size]
        total = sum(shard["bytes"] for shard in shards)
        with tqdm(total=total, unit="B", unit_scale=True, desc="verify shards", disable=rank > 0) as progress:
            for shard in shards:
                self._reader(shard["name"])
                verify_file(self.path / shard["name"], shard["sha256"])
                progress.update(shard["bytes"])
        if rank == 0:
            verify_file(self.path / TARGET_WEIGHTS, self.manifest["target_weights_sha256"])

    def target_weights(self) -> tuple[Float[Tensor, "V H"], Float[Tensor, "V H"]]:
        """Embedding and lm_head."""
        path = self.path / TARGET_WEIGHTS
        try:
            with safe_open(path, "pt") as file:
                embedding = file.get_tensor("embedding")
                lm_head = file.get_tensor("lm_head") if "lm_head" in file.keys() else embedding  # noqa: SIM118
        except (FileNotFoundError, SafetensorError) as error:
            raise InputError(
                f"{path} is missing or damaged ({error}); copy it again, or delete it and rerun "
                f"precompute.py stages=[features]"
            ) from None
        facts = self.manifest["target_config"]
        if lm_head.shape != (facts["vocab_size"], facts["hidden_size"]):
            raise InputError(f"{path} does not fit its manifest; rerun stages=[features]")
        return embedding, lm_head

    @cached_property
    def answer_counts(self) -> Int[Tensor, " V"]:
        """How often each target token occurs in the answers."""
        counts = torch.zeros(self.manifest["target_config"]["vocab_size"], dtype=torch.long)
        for token, count in self.manifest["answer_counts"]:
            counts[token] = count
        return counts

    @property
    def fingerprint(self) -> str:
        """Hash of everything that decides what training sees."""
        return sha256_json([self.manifest["made_from"], [shard["sha256"] for shard in self.manifest["shards"]]])

    def _reader(self, shard: str) -> ShardReader:
        if shard not in self._readers:  # two threads may both open a shard; the second reader stays
            entry = next(entry for entry in self.manifest["shards"] if entry["name"] == shard)
            self._readers[shard] = ShardReader(
                self.path / shard,
                expected_bytes=entry["bytes"],
                stored_teacher_rows=self.manifest["made_from"]["teacher_rows"],
            )
        return self._readers[shard]

    def _samples_of(self, shard: dict) -> list[SampleRef]:
        path = self.path / shard["name"]
        index = read_json(path.with_suffix(".json"), made_by="python precompute.py 'stages=[features]' out_dir=DIR")
        if index["sha256"] != shard["sha256"]:
            raise broken(path, "has an index that does not belong to the manifest")
        return [SampleRef(self.path, shard["name"], SampleEntry(**entry)) for entry in index["samples"]]


def save_target_weights(path: Path, embedding: Tensor, lm_head: Tensor, *, dtype: torch.dtype) -> None:
    """Tied weights are stored once."""
    tensors = {"embedding": embedding.to(dtype).contiguous()}
    if lm_head.data_ptr() != embedding.data_ptr():
        tensors["lm_head"] = lm_head.to(dtype).contiguous()
    temporary = path.with_suffix(".tmp")
    try:
        save_file(tensors, temporary)
        temporary.chmod(path.parent.stat().st_mode & 0o666)  # safetensors' files are their owner's alone
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_manifest(
    directory: Path, *, made_from: dict, target_config: dict, indices: list[dict], left_out: dict
) -> dict:
    """Join the shards' indices into the manifest; its presence says that the store is complete."""
    counts = torch.zeros(target_config["vocab_size"], dtype=torch.long)
    for index in indices:
        tokens, numbers = zip(*index["answer_counts"], strict=True)
        counts[list(tokens)] += torch.tensor(numbers)
    samples = [sample for index in indices for sample in index["samples"]]
    seen = counts.nonzero().squeeze(1)
    manifest = {
        "format_version": FORMAT_VERSION,
        "made_from": made_from,
        "target_config": target_config,
        "samples": len(samples),
        "left_out": left_out,
        "target_weights_sha256": sha256_file(directory / TARGET_WEIGHTS),
        "tokens": sum(sample["tokens"] for sample in samples),
        "answer_tokens": sum(sample["answer_tokens"] for sample in samples),
        "bytes": sum(index["bytes"] for index in indices),
        "shards": [
            {
                "name": index["shard"],
                "bytes": index["bytes"],
                "sha256": index["sha256"],
                "samples": len(index["samples"]),
            }
            for index in indices
        ],
        "answer_counts": list(zip(seen.tolist(), counts[seen].tolist(), strict=True)),
    }
    write_json(directory / "manifest.json", manifest)
    return manifest
