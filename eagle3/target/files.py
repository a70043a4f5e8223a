"""The target's files other than its weights: config, tokenizer, what ends a turn."""

import logging
import re
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from eagle3.adapters.transformers import text_part, tokenizer_json
from eagle3.errors import InputError, first_line
from eagle3.storage.files import require_regular, sha256_json
from eagle3.storage.typed_json import require_types
from eagle3.target.checkpoint_files import (
    GenerationJson,
    TargetJson,
    TokenizerJson,
    config_and_text_config,
    read_quantization,
    require_known_quantization,
    require_no_adapter,
)
from eagle3.target.facts import layer_count
from eagle3.target.hub import fetch_texts
from eagle3.target.identity import TargetIdentity, template_hash
from eagle3.target.tensors import CheckpointTensors

log = logging.getLogger(__name__)
# Keys about how or where a model was loaded or saved, not about which model it is.
VOLATILE_CONFIG = {"transformers_version", "_name_or_path", "_commit_hash", "dtype", "torch_dtype", "use_cache"}
GENERATION = "generation_config.json"
GET_AGAIN = "get the file of that model again"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, eq=False)
class TargetFiles:
    path: str  # as given: a folder or a hub id
    revision: str | None  # the commit of a hub model; None for a folder
    folder: Path  # the files; those of a hub model's weights only once `tensors` are read
    config: PreTrainedConfig
    config_dict: dict[str, Any]  # config.json as it is written
    checkpoint_dtype: str | None
    tokenizer: PreTrainedTokenizerBase
    stop_ids: frozenset[int]
    trust_remote_code: bool

    @property
    def quantization(self) -> str | None:
        """The scheme that the weights are quantised by, in words."""
        return read_quantization(self.config_dict)

    @cached_property
    def tensors(self) -> CheckpointTensors:
        return CheckpointTensors(self.path, self.revision, self.folder)

    @cached_property
    def identity(self) -> TargetIdentity:
        """Which model this is, by its files: the same whatever transformers makes of them when it loads them."""
        return make_identity(self, self.tensors.hash(layer_count(self.text_config)))

    @cached_property
    def text_config(self) -> PreTrainedConfig:
        return text_part(self.config)

    def stated(self) -> dict[str, Any]:
        """Return the fields, for a target that is more than its files."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


def read_target_files(
    *, path: str | None, revision: str | None = None, trust_remote_code: bool = False, **loading: object
) -> TargetFiles:
    """Read a local folder or a model of the Hugging Face hub; InputError for whatever cannot be a target.

    Takes the keys of conf/target, of which those for loading have no effect."""
    path = checked_path(path)
    if (folder := Path(path)).is_dir():
        for file in folder.iterdir():
            require_regular(file, named=f"target.path={path}: {file.name}")
        if revision is not None:
            log.warning(
                "target.revision=%s has no effect: target.path=%s is a folder here, not a hub id", revision, path
            )
            revision = None
    else:
        folder = fetch_texts(path, revision)
        revision = folder.name
    require_no_adapter(path, folder)
    config_dict, config = load_config(path, folder, trust_remote_code=trust_remote_code)
    if config.is_encoder_decoder:
        raise InputError(
            f"target.path={path}: is_encoder_decoder=true in its config.json (model_type={config.model_type}), and a "
            f"target reads prompt and answer as one text; choose a causal language model"
        )
    require_known_quantization(path, folder, config_dict)
    tokenizer = load_tokenizer(path, folder, trust_remote_code=trust_remote_code)
    return TargetFiles(
        path=path,
        revision=revision,
        folder=folder,
        config=config,
        config_dict=config_dict,
        checkpoint_dtype=stated_dtype(config_dict),
        tokenizer=tokenizer,
        stop_ids=ends_of_turn(path, folder, config, tokenizer),
        trust_remote_code=trust_remote_code,
    )


def checked_path(path: str | None) -> str:
    """Return `target.path`, which is an existing folder or may be a hub id."""
    if not path:
        raise InputError("target.path is not set; give a model folder or a hub id, e.g. target.path=/models/mine")
    path = str(path)
    if Path(path).is_file():
        raise InputError(f"target.path={path} is a file; give the folder of a Hugging Face model, with its config.json")
    if not Path(path).is_dir() and not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", path, re.ASCII):
        remedy = "give an existing model folder or a hub id (owner/name)"
        if path.startswith("~"):
            remedy = "a shell leaves ~ after = as it is: write $HOME, or the whole path"
        raise InputError(f"target.path={path} does not exist; {remedy}")
    return path


def load_config(path: str, folder: Path, *, trust_remote_code: bool) -> tuple[dict[str, Any], PreTrainedConfig]:
    """Return config.json as it is written, and as transformers understands it."""
    try:
        config_dict, _ = PreTrainedConfig.get_config_dict(folder)
        require_types(config_dict, TargetJson, source=f"target.path={path}: config.json", remedy=GET_AGAIN)
        return config_dict, AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except InputError:
        raise
    except Exception as error:  # of code that comes with the model, too
        there = (folder / "config.json").exists()
        usual = "give the folder of a Hugging Face model, or its id"
        usual = f"correct that, or {usual}" if there else usual
        of_trainer, of_hub = folder.glob("*/config.json"), folder.glob("snapshots/*/config.json")
        inside = [file for file in (*of_trainer, *of_hub) if file.is_file()]
        if inside and not there:
            newest = max(inside, key=lambda file: file.stat().st_mtime).parent
            usual = f"give a folder in it that has a config.json, e.g. target.path={newest}"
        elif not there:
            usual = f"it has no config.json, as a copy in GGUF: {usual}"
        remedy = _remedy(error, usual)
        raise InputError(
            f"target.path={path} is neither a model folder nor a readable hub model ({first_line(error)}); {remedy}"
        ) from error


def load_tokenizer(path: str, folder: Path, *, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # of code that comes with the model, too
        remedy = _remedy(error, "put tokenizer.json and tokenizer_config.json next to config.json")
        raise InputError(f"target.path={path} has no usable tokenizer ({first_line(error)}); {remedy}") from error
    limit = {"model_max_length": tokenizer.model_max_length}
    require_types(limit, TokenizerJson, source=f"target.path={path}: tokenizer_config.json", remedy=GET_AGAIN)
    return tokenizer


def _remedy(error: Exception, usual: str) -> str:
    if "trust_remote_code" in str(error):
        return "it brings Python code of its own: read that, and set target.trust_remote_code=true to run it"
    return usual


def ends_of_turn(
    path: str, folder: Path, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> frozenset[int]:
    """Return the ids that end a turn when the target generates."""
    own = (folder / GENERATION).exists()
    try:  # as transformers does for a loaded model: from its own file, else from the model's config
        generation = GenerationConfig.from_pretrained(folder) if own else GenerationConfig.from_model_config(config)
    except Exception as error:
        file = GENERATION if own else "config.json"
        raise InputError(
            f"target.path={path}: transformers reads no settings of generation from {file} ({first_line(error)}); "
            f"{GET_AGAIN}"
        ) from error
    eos = generation.eos_token_id
    require_types({"eos_token_id": eos}, GenerationJson, source=f"target.path={path}", remedy=GET_AGAIN)
    ids = {*(eos if isinstance(eos, list) else [eos]), tokenizer.eos_token_id}
    return frozenset(ids - {None})


def stated_dtype(config: dict[str, Any]) -> str | None:
    """Return the dtype of the files, if a head can be served in it."""
    stated = [part.get(key) for part in config_and_text_config(config) for key in ("dtype", "torch_dtype")]
    return next((dtype for dtype in stated if dtype in DTYPES), None)  # heads are served in these


# --- identity --------------------------------------------------------------------------------------------------------


def make_identity(files: TargetFiles, weights_hash: str) -> TargetIdentity:
    """Return which model this is, with the tokenizer's own chat template."""
    template = files.tokenizer.chat_template
    return TargetIdentity(
        name=files.path,
        revision=files.revision,
        precision=files.quantization or files.checkpoint_dtype or "unstated",
        config_hash=config_hash(files.config_dict),
        tokenizer_hash=_tokenizer_hash(files.tokenizer),
        template_hash=template_hash(template.get("default") if isinstance(template, dict) else template),
        weights_hash=weights_hash,
    )


def config_hash(config_dict: dict[str, Any]) -> str:
    return sha256_json(_without_volatile(config_dict))


def _without_volatile(config: Any) -> Any:
    if not isinstance(config, dict):
        return config
    return {key: _without_volatile(value) for key, value in config.items() if key not in VOLATILE_CONFIG}


def _tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    content = tokenizer_json(tokenizer)
    if content is None:  # Mistral's own tokenizers
        return sha256_json(tokenizer.get_vocab())
    # These settings remain after a tokenizer was called with padding or truncation.
    return sha256_json({key: value for key, value in content.items() if key not in ("padding", "truncation")})
