"""The tensors of a checkpoint, read from its files: by name, and a hash of samples of all of them."""

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eagle3.errors import InputError, first_line
from eagle3.storage.files import WEIGHTS
from eagle3.storage.typed_json import WeightIndex, read_typed
from eagle3.target.hub import fetch_weights

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
SAMPLE = 1024  # values at the start, in the middle and at the end of a tensor
# Not of the text model: what old checkpoints store of the config, towers, and parts that predict several tokens. The
# last may also be layers with numbers of their own. Copies that others saved often lack them.
ELSEWHERE = re.compile(r"rotary_emb\.inv_freq$|(^|\.)(mtp|\w*(vision|visual|audio|image|projector)\w*)\.")
LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
ROUNDED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, eq=False)
class CheckpointTensors:
    """The safetensors files in a folder, which those of a hub model are fetched into; errors name `target.path`."""

    path: str
    commit: str | None  # of a hub model
    files: Path  # the other files

    @cached_property
    def folder(self) -> Path:
        if self.commit is not None:
            fetch_weights(self.path, self.commit, self.files, sorted({*(self._indexed or {"": SINGLE}).values()}))
        return self.files

    @cached_property
    def _indexed(self) -> dict[str, str] | None:
        if not (self.files / INDEX).is_file():
            return None
        index = read_typed(self.files / INDEX, WeightIndex, made_by=f"fetch target.path={self.path} again")
        files = index["weight_map"]
        if self.commit is None and (self.files / SINGLE).exists() and SINGLE not in files.values():
            raise InputError(
                f"target.path={self.path} holds two sets of weights: transformers reads {SINGLE}, servers the files "
                f"that {INDEX} names; remove the one that is not of this model"
            )
        return files

    @cached_property
    def file_by_tensor(self) -> dict[str, str]:
        """The file that holds each tensor, by the tensor's name."""
        if self._indexed is not None:
            return self._indexed
        alone = self.folder / SINGLE  # the only one that transformers reads: others may be the same in another layout
        files = [SINGLE] if alone.is_file() else sorted(path.name for path in self.folder.glob(WEIGHTS))
        if not files:
            raise InputError(
                f"target.path={self.path} holds no *.safetensors, and other formats (*.bin, *.gguf) are not read; give "
                f"its weights in that format"
            )
        return {key: file for file in files for key in self._open(file).keys()}  # noqa: SIM118

    def require_known_names(self) -> None:
        """Raise InputError for files that servers may find and transformers does not look for."""
        if self.commit is None and not any((self.files / name).exists() for name in (INDEX, SINGLE)):
            raise InputError(
                f"target.path={self.path} holds {next(iter(self.file_by_tensor.values()))}, and transformers reads "
                f"only {SINGLE}, or the files that {INDEX} names: rename a single file, or get the index, too"
            )

    def require_files(self) -> None:
        """Raise InputError if a file of weights is missing or incomplete; reads no values."""
        for file in sorted({*self.file_by_tensor.values()}):
            self._open(file)

    def stored_as(self, name: str) -> tuple[str, list[int]]:
        """Return the dtype of a tensor, as safetensors names it, and its shape."""
        with self._open(self.file_by_tensor[name]) as file:
            part = file.get_slice(name)
            return part.get_dtype(), part.get_shape()

    def read(self, name: str) -> Tensor:
        with self._open(self.file_by_tensor[name]) as file:
            try:
                return file.get_tensor(name)
            except SafetensorError as error:
                raise self._unreadable(self.file_by_tensor[name], error) from None

    @property
    def size(self) -> int:
        """In bytes."""
        return sum((self.folder / file).stat().st_size for file in {*self.file_by_tensor.values()})

    def hash(self, num_layers: int) -> str:
        """Return the hash of samples of every tensor of the text model, as it is stored: quick at any size, and another
        value after any fine-tuning, also of experts and routers alone.

        It does not depend on names, on the order or number of files, nor on a copy of a tied lm_head."""
        names = [name for name in self.file_by_tensor if _is_of_text(name, num_layers)]
        digests = {hashlib.sha256(sample).digest() for sample in self._samples(names)}
        return hashlib.sha256(b"".join(sorted(digests))).hexdigest()

    def _samples(self, names: Iterable[str]) -> Iterator[bytes]:
        by_file: dict[str, list[str]] = {}
        for name in names:
            by_file.setdefault(self.file_by_tensor[name], []).append(name)
        for file, of_file in by_file.items():
            with self._open(file) as tensors:
                try:
                    yield from (_sample(tensors, name) for name in of_file)
                except SafetensorError as error:
                    raise self._unreadable(file, error) from None

    def _open(self, file: str) -> Any:
        try:
            return safe_open(self.folder / file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise self._unreadable(file, error) from None

    def _unreadable(self, file: str, error: Exception) -> InputError:
        return InputError(
            f"target.path={self.path}: {file} cannot be read ({first_line(error)}); it is missing, cut, or a pointer "
            f"of Git LFS in its place: fetch it again"
        )


def _is_of_text(name: str, num_layers: int) -> bool:
    layer = LAYER.search(name)
    return not ELSEWHERE.search(name) and (layer is None or int(layer[1]) < num_layers)


def _sample(file: Any, name: str) -> bytes:
    part = file.get_slice(name)
    shape = part.get_shape()
    if torch.Size(shape).numel() <= 3 * SAMPLE:
        tensors = [file.get_tensor(name)]
    elif len(shape) > 2:  # of each expert, where they are stored as one tensor
        tensors = [part[:, :1]]
    else:
        rows = -(-SAMPLE // torch.Size(shape[1:]).numel())
        tensors = [part[start : start + rows] for start in (0, shape[0] // 2, shape[0] - rows)]
    return b"".join(map(_content, tensors))


def _content(tensor: Tensor) -> bytes:
    """Return the values in bfloat16, the same from float32 as from bfloat16; of quantised tensors the bytes."""
    values = tensor.reshape(-1)
    if values.dtype in ROUNDED:
        values = values.to(torch.bfloat16)
    return values.contiguous().view(torch.uint8).numpy().tobytes()
