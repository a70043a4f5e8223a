"""Target metadata and embeddings, read from checkpoint files without loading the model.

Shapes: H hidden size, V target vocabulary."""

from collections.abc import Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from eagle3.adapters.transformers import renamings
from eagle3.errors import InputError
from eagle3.target.checkpoint_files import stale_lm_head
from eagle3.target.facts import TargetConfig, require_sizes, target_config
from eagle3.target.files import TargetFiles, read_target_files
from eagle3.target.model import empty_model, find_decoder, is_tied

HALF_OR_FLOAT = ("BF16", "F16", "F32")  # as safetensors names them


@dataclass(frozen=True, eq=False)
class StoredTarget(TargetFiles):
    """Everything that the stages need of a target except the model; has the same identity as the loaded one."""

    @cached_property
    def embedding(self) -> Float[Tensor, "V H"]:
        return self._plain(self._names.embedding)

    @cached_property
    def lm_head(self) -> Float[Tensor, "V H"]:
        """The very tensor of the embedding where they are tied."""
        if self._names.lm_head is not None:
            return self._plain(self._names.lm_head)
        if self._names.copy is not None and not torch.equal(self._plain(self._names.copy), self.embedding):
            raise stale_lm_head(self.path)
        return self.embedding

    @cached_property
    def facts(self) -> TargetConfig:
        return target_config(self.text_config, len(self.lm_head), self.checkpoint_dtype)

    @property
    def weights_bytes(self) -> int:
        return self.tensors.size

    @cached_property
    def _names(self) -> "TensorNames":
        return tensor_names(self, self.tensors.file_by_tensor.keys())

    def require_weights(self) -> None:
        """Raise InputError for files that are missing or cut, and for an embedding or an lm_head that cannot be stored
        next to the features; reads no values but those of a copy of a tied lm_head."""
        self.tensors.require_files()
        for name in filter(None, self._names):
            self._require_plain(name)
        if self._names.copy is not None:
            _ = self.lm_head

    def _plain(self, name: str) -> Tensor:
        self._require_plain(name)
        return self.tensors.read(name)

    def _require_plain(self, name: str) -> None:
        dtype, shape = self.tensors.stored_as(name)
        if dtype not in HALF_OR_FLOAT or len(shape) != 2:
            raise not_plain(self, f"{name} is {dtype} {shape}")


class TensorNames(NamedTuple):
    """The checkpoint's names of the tensors that are read here; `lm_head` is None if it is the embedding, and `copy`
    then its name where it is in the files, too."""

    embedding: str
    lm_head: str | None
    copy: str | None = None


def tensor_names(files: TargetFiles, keys: Set[str]) -> TensorNames:
    """Look the names of the model that transformers would build up among the checkpoint's `keys`."""
    model = empty_model(files)
    decoder: Any = find_decoder(model, files.path)
    name_of = {parameter: name for name, parameter in (*model.named_parameters(), *decoder.named_parameters())}
    embedding: Any = model.get_input_embeddings().weight
    lm_head: Any = model.get_output_embeddings().weight

    def the_one(parameter: Any) -> str:
        # The rest of the name differs between files of text parts and of whole models.
        name = ".".join(name_of[parameter].split(".")[-2:])
        found = [key for key in keys if f".{key}".endswith(f".{name}")]
        if not found:  # transformers may rename what it loads
            renamed = renamings(model)
            found = [key for key in keys if f".{renamed(key)}".endswith(f".{name}")]
        if len(found) == 1:
            return found[0]
        raise not_plain(files, f"its checkpoint has {len(found) or 'no'} tensors {name}, found by that name only")

    at = the_one(embedding)
    if not is_tied(model):
        return TensorNames(at, the_one(lm_head))
    own = {name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter is lm_head}
    return TensorNames(at, None, next((key for key in keys if key in own and key != at), None))


def not_plain(files: TargetFiles, found: str) -> InputError:
    """Return the error of a target whose embedding or lm_head cannot be stored next to the features."""
    if files.quantization is None:
        return InputError(f"target.path={files.path}: {found}; get the whole checkpoint, or choose another target")
    return InputError(
        f"target.path={files.path} is quantised ({files.quantization}), embedding and lm_head too: {found}, and a head "
        f"is trained with both in half precision; give a copy that keeps these two, or one without quantisation"
    )


def stored_target(**settings: Any) -> StoredTarget:
    """Read a target's files; takes the keys of conf/target. Raises InputError for one of which no head has a size."""
    target = StoredTarget(**read_target_files(**settings).stated())
    require_sizes(target.text_config, target.path)
    return target
