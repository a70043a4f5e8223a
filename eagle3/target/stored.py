"""Target metadata and embeddings, read from checkpoint files without loading the model.

Shapes: H hidden size, V target vocabulary."""

import json
from collections.abc import Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import snapshot_download
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eagle3.errors import InputError, first_line
from eagle3.target.facts import TargetConfig, target_config
from eagle3.target.files import TargetFiles, read_target_files
from eagle3.target.identity import TargetIdentity
from eagle3.target.model import (
    HASHED,
    decoder_of,
    empty_model,
    hashed_parameters,
    identity_of,
    weights_hash,
)

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, eq=False)
class StoredTarget(TargetFiles):
    """Everything that the stages need of a target except the model; has the same identity as the loaded one."""

    @cached_property
    def embedding(self) -> Float[Tensor, "V H"]:
        return self._tensor(self._names.embedding)

    @cached_property
    def lm_head(self) -> Float[Tensor, "V H"]:
        """The very tensor of the embedding where they are tied."""
        return self.embedding if self._names.lm_head is None else self._tensor(self._names.lm_head)

    @cached_property
    def facts(self) -> TargetConfig:
        return target_config(self.text_config, len(self.lm_head), self.checkpoint_dtype)

    @cached_property
    def identity(self) -> TargetIdentity:
        hashed = weights_hash(self._start(name) for name in self._names.hashed)
        return identity_of(self, hashed)

    @property
    def weights_bytes(self) -> int:
        return sum((self._folder / file).stat().st_size for file in {*self._file_of.values()})

    # --- tensors of the checkpoint -----------------------------------------------------------------------------------

    @cached_property
    def _folder(self) -> Path:
        if Path(self.path).is_dir():
            return Path(self.path)
        return Path(snapshot_download(self.path, revision=self.revision, allow_patterns=["*.safetensors", INDEX]))

    @cached_property
    def _file_of(self) -> dict[str, str]:
        if (self._folder / INDEX).is_file():
            return json.loads((self._folder / INDEX).read_bytes())["weight_map"]
        files = sorted(path.name for path in self._folder.glob("*.safetensors"))
        if not files:
            raise InputError(f"target.path={self.path} holds no *.safetensors; fetch its weights, in that format")
        return {key: file for file in files for key in self._open(file).keys()}  # noqa: SIM118

    @cached_property
    def _names(self) -> "TensorNames":
        return tensor_names(self, self._file_of.keys())

    def _open(self, file: str) -> safe_open:
        try:
            return safe_open(self._folder / file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise InputError(
                f"target.path={self.path}: {file} cannot be read ({first_line(error)}); it is missing, cut, or a "
                f"pointer of Git LFS in its place: fetch it again"
            ) from None

    def _tensor(self, name: str) -> Tensor:
        with self._open(self._file_of[name]) as file:
            return file.get_tensor(name)

    def _start(self, name: str) -> Tensor:
        """Return the rows that hold the first values."""
        with self._open(self._file_of[name]) as file:
            part = file.get_slice(name)
            rows, *others = part.get_shape()
            return part[: min(rows, -(-HASHED // max(1, torch.Size(others).numel())))]


class TensorNames(NamedTuple):
    """The checkpoint's names of the tensors that are read here; `lm_head` is None if it is the embedding."""

    hashed: list[str]
    embedding: str
    lm_head: str | None


def tensor_names(files: TargetFiles, keys: Set[str]) -> TensorNames:
    """Look the names of the model that transformers would build up among the checkpoint's `keys`."""
    model = empty_model(files)
    decoder: Any = decoder_of(model, files.path)
    relative = {parameter: name for name, parameter in decoder.named_parameters()}
    embedding: Any = model.get_input_embeddings().weight
    lm_head: Any = model.get_output_embeddings().weight

    def the_one(name: str, found: list[str]) -> str:
        if len(found) == 1:
            return found[0]
        raise InputError(
            f"target.path={files.path}: its checkpoint has {len(found) or 'no'} tensors {name}, and it is found "
            f"by that name alone; choose another target"
        )

    def ending(name: str) -> str:
        return the_one(name, [key for key in keys if f".{key}".endswith(f".{name}")])

    at = ending(relative[embedding])
    front = at.removesuffix(relative[embedding])  # checkpoints with images put other words there than the model
    hashed = [the_one(name, [*({front + name} & keys)]) for name, _ in hashed_parameters(decoder)]
    return TensorNames(hashed, at, None if lm_head is embedding else ending("lm_head.weight"))


def stored_target(**settings: Any) -> StoredTarget:
    """Read a target's files; takes the keys of conf/target."""
    return StoredTarget(**read_target_files(**settings).stated())
