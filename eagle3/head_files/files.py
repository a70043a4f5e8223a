"""Reads the files of a head, before any check: config.json, the tensors under DraftHead's names, training.json.

Two layouts of config.json are read: SGLang's own, which this project, SpecForge, Model-Optimizer and EAGLE's authors
write, and that of vLLM's speculators, which nests the draft layer's keys. SGLang's layout may name the captured layers
in two places: in `eagle_config` as outputs of layers, and at the top level as `hidden_states` indices, one more each.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from eagle3.errors import InputError
from eagle3.head_files.config_json import HeadJson
from eagle3.head_files.record import HeadRecord, read_record
from eagle3.storage.files import WEIGHTS, sha256_file
from eagle3.storage.replace import put_right
from eagle3.storage.typed_json import WeightIndex, read_typed

USUAL_CAPTURED_LAYERS = 3  # where config.json does not say how many
ARCHITECTURE = "LlamaForCausalLMEagle3"
MAKE_HEAD = "python serve.py action=export run=RUN head=HEAD"
KIND = "head_kind"  # of a kind of your own: its import path
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
IDS_KEY = f"eagle_config.{LAYER_IDS}"
NESTED = "transformer_layer_config"  # in the layout of vLLM's speculators
INDEX = "model.safetensors.index.json"
# Other trainers' names for the same tensors; SGLang's loader takes them all.
OTHER_NAMES = {
    "layers.0.": "midlayer.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}


@dataclass(frozen=True)
class HeadFiles:
    """The content of a head's folder.

    `written` is config.json as it is in the folder; `config` is the same in SGLang's layout. `record` is None for the
    head of another trainer."""

    path: Path
    config: dict[str, Any]
    written: dict[str, Any]
    tensors: dict[str, Tensor]
    record: HeadRecord | None

    @property
    def nested(self) -> bool:
        """Say whether config.json is in the layout of vLLM's speculators."""
        return NESTED in self.written

    @property
    def eagle_config(self) -> dict[str, Any]:
        return self.config.get("eagle_config") or {}

    @property
    def layer_ids(self) -> list[int] | None:
        """Ids of layer outputs in `eagle_config`, where SGLang reads them; it has a default where there are none."""
        return self.eagle_config.get(LAYER_IDS)

    @property
    def top_level_ids(self) -> list[int] | None:
        """`hidden_states` indices at the top level, where vLLM and llama.cpp read them and SGLang does not."""
        return self.config.get(LAYER_IDS)

    def served_layers(self, num_layers: int) -> list[int]:
        """Return the layers of a target with `num_layers` that a server captures: `hidden_states` indices, ascending.

        The server is SGLang, which adds one to the ids, or vLLM for the speculators' layout, which takes the ids as
        they are. Both capture in the order of the layers, whatever the order of the list. The default is that of
        set_eagle3_layers_to_capture in SGLang's target models, and vLLM's."""
        of_vllm = self.nested and self.top_level_ids
        ids = of_vllm or self.layer_ids
        if ids is None:
            return [2, num_layers // 2, num_layers - 3]
        layers = sorted({layer if of_vllm else layer + 1 for layer in ids})
        number = self.config.get("num_aux_hidden_states") or USUAL_CAPTURED_LAYERS
        if len(layers) != number or layers[0] < 1 or layers[-1] >= num_layers:
            raise InputError(
                f"head={self.path}: layer ids {ids} are not {number} different ones from 0 to "
                f"{num_layers - 2} of the target's {num_layers} layers; set {IDS_KEY} to those of the "
                f"training, or give the target that the head was trained on"
            )
        return layers

    def trained_layers(self, num_layers: int) -> list[int]:
        """Return the layers that the head was trained on as far as the folder tells: `hidden_states` indices, in its
        order.

        Ids at the top level alone are taken for `hidden_states` indices, as vLLM does; without any ids the layers are
        SGLang's default."""
        if self.record:
            return self.record.origin.capture_layers
        if self.layer_ids is None:
            return self.top_level_ids or self.served_layers(num_layers)
        return [layer + 1 for layer in self.layer_ids]


def read_files(path: str | Path) -> HeadFiles:
    """Read an exported head of any trainer; InputError for files that are missing, damaged or of the wrong kind."""
    found = read_without_weights(path)
    for shard in weight_files(found.path):
        tensors = _read_tensors(shard)
        if twice := min(tensors.keys() & found.tensors.keys(), default=None):
            raise InputError(
                f"{shard} has {twice}, which another file of the folder has too, and a server loads either; move away "
                f"the file that is not of this head"
            )
        found.tensors.update(tensors)
    if found.record is not None:
        _require_as_exported(found.path, found.record)
    return found


def read_without_weights(path: str | Path) -> HeadFiles:
    """Read config.json and training.json alone, which takes no time; `tensors` stays empty."""
    folder = Path(path)
    if folder.is_file():
        raise InputError(f"head={path} is a file; give the folder of an exported head, made by: {MAKE_HEAD}")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) and not folder.is_dir():
        raise InputError(
            f"head={path} is no folder here; make it with: {MAKE_HEAD}, or, if it is a head on the Hugging Face hub, "
            f"get it with: hf download {path} --local-dir HEAD"
        )
    put_right(folder)  # after an export that was killed
    config = read_typed(folder / "config.json", HeadJson, made_by=MAKE_HEAD)
    files = HeadFiles(folder, _flat(config), config, {}, read_record(folder, made_by=MAKE_HEAD))
    _require_same_layers(files)
    return files


def layer_id_entries(layers: list[int]) -> str:
    """Return the entries of config.json that name these `hidden_states` indices, for the advice in an error."""
    return f"{IDS_KEY} to {[layer - 1 for layer in layers]} and {LAYER_IDS} at the top level to {layers}"


def _require_same_layers(files: HeadFiles) -> None:
    """Raise InputError where the two places name different layers: servers would capture different ones."""
    outputs, indices = files.layer_ids, files.top_level_ids
    if outputs is not None and indices is not None and indices != [layer + 1 for layer in outputs]:
        raise InputError(
            f"head={files.path}: {IDS_KEY}={outputs} and {LAYER_IDS}={indices} at the top level of config.json name "
            f"different layers: the first counts outputs of layers and the second is one more each; correct one of "
            f"them, or make the head again: {MAKE_HEAD}"
        )


def _require_as_exported(folder: Path, record: HeadRecord) -> None:
    for name, sha256 in record.files.items():
        if not (folder / name).is_file() or sha256_file(folder / name) != sha256:
            raise InputError(
                f"{folder / name} is not the file that was exported: it does not have the sha256 in training.json; "
                "copy or export the head again, or take training.json out of the folder if it was changed on purpose"
            )


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config that SGLang would need; a config of the speculators names defaults as null."""
    if NESTED not in config:
        return config
    stated = {key: value for key, value in config.items() if key != NESTED and value is not None}
    # The nested keys are copied from the target, whose tied embeddings say nothing of the head's own lm_head.
    flat = {"architectures": [ARCHITECTURE], "model_type": "llama", "tie_word_embeddings": False}
    return (config[NESTED] or {}) | stated | flat


def weight_files(folder: Path) -> list[Path]:
    """Return the files that the index names, as SGLang reads them; without an index all safetensors files."""
    if (folder / INDEX).exists():
        weight_map = read_typed(folder / INDEX, WeightIndex, made_by=MAKE_HEAD)["weight_map"]
        found = [folder / name for name in sorted({*weight_map.values()})]
        if missing := [path.name for path in found if not path.is_file()]:
            raise InputError(f"{folder / INDEX} names {missing[0]}, which does not exist; copy all files again")
    else:
        found = sorted(folder.glob(WEIGHTS))
    if not found:
        raise InputError(
            f"head={folder} has no *.safetensors file; make it: {MAKE_HEAD}. A pickle (*.bin, *.pt) can run code and "
            f"is not read: convert it on a safe machine with save_file(torch.load(FILE, weights_only=True), "
            f"'model.safetensors')"
        )
    return found


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, "pt") as file:
            return {plain_name(name): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, FileNotFoundError) as error:  # of a link, too, whose file was not copied
        raise InputError(f"{path} is truncated or damaged ({error}); copy it again, or make it: {MAKE_HEAD}") from None


def plain_name(name: str) -> str:
    """Return the name in DraftHead of a tensor that SGLang finds under `name`; any other stays as it is."""
    if name != "model.lm_head.weight":  # lm_head is no part of SGLang's inner model
        name = name.removeprefix("model.")
    for other, ours in OTHER_NAMES.items():
        if name.startswith(other):
            return ours + name.removeprefix(other)
    return name
