"""The exported head: config.json and model.safetensors as SGLang's LlamaForCausalLMEagle3 reads them, both ways.

The head is EAGLE-3's (arXiv:2503.01840); its options `fc_norm` and `norm_output` are EAGLE-3.1's (arXiv:2605.09992),
`norm_before_fc` and `norm_before_residual` are those of vLLM's speculators.
The project counts captured layers as Hugging Face's `hidden_states` (input of layer i). config.json names them twice:
in `eagle_config` as outputs of layers (i - 1), to which SGLang adds 1, and at the top level as they are, where vLLM
and llama.cpp read them.

Shapes: V target vocabulary, D draft vocabulary.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from safetensors.torch import save
from torch import Tensor

from eagle3.errors import InputError
from eagle3.head.draft_head import HeadConfig, WithoutValues
from eagle3.head.draft_vocab import from_offsets, membership, to_offsets
from eagle3.head.eagle3 import EAGLE3, has_fc_norm, has_norm_before_fc, read_rope
from eagle3.head.head import Head, HeadSizes
from eagle3.head.kind import Kind
from eagle3.head.registry import kind_in, kind_named, new_head
from eagle3.head_files.files import KIND, LAYER_IDS, MAKE_HEAD, USUAL_CAPTURED_LAYERS, HeadFiles, read_files
from eagle3.storage.files import read_json, write_json, write_whole
from eagle3.target.facts import ROPE_TYPES
from eagle3.target.files import DTYPES

VOCABULARY_MAPS = ("d2t", "t2d")
INTEGERS = (torch.int64, torch.int32, torch.int16)  # of d2t
EMBEDDING = "embed_tokens.weight"  # some trainers store a copy; servers share the target's


@dataclass(frozen=True)
class LoadedHead:
    """An exported head, ready to run. `capture_layers` are indices into Hugging Face's `hidden_states`."""

    head: Head
    capture_layers: list[int]


# --- writing ---------------------------------------------------------------------------------------------------------


def save_head(directory: Path, head: Head, capture_layers: list[int], dtype: str) -> None:
    """Write config.json and model.safetensors in the target's `dtype`; `capture_layers` index `hidden_states`."""
    write_json(directory / "config.json", exported_config(head.config, capture_layers, dtype, kind_named(head.kind)))
    write_whole(directory / "model.safetensors", save(exported_tensors(head, DTYPES[dtype]), {"format": "pt"}))


def exported_config(config: HeadSizes, capture_layers: list[int], dtype: str, kind: Kind = EAGLE3) -> dict[str, Any]:
    """Return config.json: for EAGLE-3 as SGLang reads it."""
    number = len(capture_layers)
    return {
        "architectures": [kind.architecture],
        **({} if kind is EAGLE3 else {KIND: kind.name}),
        **kind.to_json(config),
        **({} if number == USUAL_CAPTURED_LAYERS else {"num_aux_hidden_states": number}),
        "dtype": dtype,
        "torch_dtype": dtype,
        LAYER_IDS: capture_layers,
        "eagle_config": {"use_aux_hidden_state": True, LAYER_IDS: [layer - 1 for layer in capture_layers]},
    }


def exported_tensors(head: Head, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the weights in `dtype`, d2t as offsets and t2d as a mask.

    A head that drafts the whole vocabulary has neither: no server needs them, and vLLM stops at a d2t."""
    weights = {name: weight.detach().to("cpu", dtype).contiguous() for name, weight in head.named_parameters()}
    draft_ids, vocab_size = head.draft_ids.cpu().long(), head.config.vocab_size
    if torch.equal(draft_ids, torch.arange(vocab_size)):
        return weights
    return weights | {"d2t": to_offsets(draft_ids), "t2d": membership(draft_ids, vocab_size)}


# --- reading ---------------------------------------------------------------------------------------------------------


def load_head(path: str | Path, *, num_layers: int, dtype: torch.dtype | None = None) -> LoadedHead:
    """Read an exported head, ours or another trainer's, for a target of so many layers; in the dtype of its file
    unless told otherwise."""
    files = read_files(path)
    return LoadedHead(draft_head(files, dtype), files.served_layers(num_layers))


def draft_head(files: HeadFiles, dtype: torch.dtype | None) -> Head:
    """Return the head without gradients, in the dtype of its file unless told otherwise; InputError where it cannot."""
    config = head_config(files)
    head = build_draft_head(files, config, draft_ids(files, config))
    weights: dict[str, Tensor] = {}
    for name, expected in head.named_parameters():
        stored = files.tensors.get(name)
        if stored is None or stored.shape != expected.shape:
            shape, found = tuple(expected.shape), "nothing" if stored is None else tuple(stored.shape)
            raise InputError(f"head={files.path}: {name} must have shape {shape} by config.json, the file has {found}")
        # Copied: float32 products round differently where weights begin in the middle of a cache line, as in the file.
        weights[name] = stored.to(dtype or stored.dtype, copy=True)
        if number := lost_values(weights[name]):  # decoding would still run, with an accept length of 1
            raise InputError(
                f"head={files.path}: {name} holds {number} non-finite values in {weights[name].dtype}: every draft "
                f"would be rejected; copy the head again, or export it again with: {MAKE_HEAD}"
            )
    # Assigned, not cast with .to(): RoPE's frequencies must stay in float32.
    head.load_state_dict(weights | {"draft_ids": head.draft_ids}, assign=True)
    return head.eval().requires_grad_(False)


def read_kind(files: HeadFiles) -> Kind:
    """Return the kind that config.json, or else training.json, names; other trainers' are taken for EAGLE-3, and the
    checks say so."""
    return kind_in(files.path, files.config.get(KIND) or (files.record.kind if files.record else EAGLE3.name))


def head_config(files: HeadFiles) -> HeadSizes:
    """Read the head's sizes and options from config.json; InputError for a head that DraftHead does not compute."""
    if read_kind(files) is EAGLE3:
        require_readable(files)
    try:
        config = read_kind(files).from_json(files.config)
        sizes = fields(HeadConfig if isinstance(config, HeadConfig) else HeadSizes)
        if null := next((each.name for each in sizes if getattr(config, each.name) is None), None):
            raise InputError(f"head={files.path}: config.json has {null}=null, a size that is null; state it")
        return config
    except KeyError as error:
        raise InputError(f"head={files.path}: config.json lacks {error}; add it, or make it: {MAKE_HEAD}") from None
    except TypeError:
        raise InputError(f"head={files.path}: config.json has a size that is null; state it") from None


def require_readable(files: HeadFiles) -> None:
    """Raise InputError for what SGLang serves, or tries to, and this project's DraftHead does not compute."""
    config = files.config
    rule = (
        "this project reads heads of one Llama layer without biases that norm layers of the target's width once and "
        "draft token by token"
    )
    foreign = {
        "speculators_model_type": config.get("speculators_model_type") not in (None, EAGLE3.name),
        # P-EAGLE's, which draft all tokens at once: Automodel's, Model-Optimizer's, SpecForge's.
        "parallel_drafting": bool(config.get("parallel_drafting")),
        "eagle_config.parallel_draft_step": (files.eagle_config.get("parallel_draft_step") or 1) > 1,
        "architectures": any("PEagle" in name for name in config.get("architectures") or ()),
        "num_hidden_layers": config.get("num_hidden_layers", 1) != 1,
        "target_hidden_size": config.get("target_hidden_size") not in (None, config.get("hidden_size")),
        "bias": bool(config.get("bias")),
        "norm_before_fc with fc_norm": has_norm_before_fc(config) and has_fc_norm(config),
        "eagle_config.use_aux_hidden_state": not files.eagle_config.get("use_aux_hidden_state", True),
        "quantization_config": bool(config.get("quantization_config")),
    }
    for key, differs in foreign.items():
        if differs:
            raise InputError(f"head={files.path}: {key} of config.json: {rule}; choose another head")
    kind = (read_rope(config) or {}).get("rope_type", "default")
    if kind not in ROPE_TYPES:
        raise InputError(
            f"head={files.path}: rope_type={kind} in config.json: SGLang stops at types it does not know, and may "
            f"compute others than {', '.join(ROPE_TYPES)} unlike the training; correct it, or train with one of these"
        )


def draft_ids(files: HeadFiles, config: HeadSizes) -> Int[Tensor, " D"]:
    """Return the target ids of the draft vocabulary; without d2t it can only be the whole vocabulary."""
    if "d2t" in files.tensors:
        d2t = files.tensors["d2t"]
        if d2t.dtype not in INTEGERS or d2t.ndim != 1:
            raise InputError(f"head={files.path}: d2t is {d2t.dtype} {[*d2t.shape]} instead of a list of int64")
        ids = from_offsets(d2t.long())
        if len(ids) != config.draft_vocab_size or not 0 <= int(ids.min()) <= int(ids.max()) < config.vocab_size:
            raise InputError(
                f"head={files.path}: d2t does not map {config.draft_vocab_size} draft ids into the vocabulary"
            )
        return ids
    if config.draft_vocab_size != config.vocab_size:
        raise InputError(
            f"head={files.path} has no tensor d2t, so its {config.draft_vocab_size} draft ids cannot be mapped to "
            f"tokens; export it again with: {MAKE_HEAD}"
        )
    return torch.arange(config.vocab_size)


def expected_shapes(files: HeadFiles, config: HeadSizes) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight that a server expects, by the names of DraftHead."""
    with torch.device("meta"):
        head = build_draft_head(files, config, torch.empty(config.draft_vocab_size, dtype=torch.long))
    return {name: tuple(weight.shape) for name, weight in head.named_parameters()}


def build_draft_head(files: HeadFiles, config: HeadSizes, ids: Int[Tensor, " D"]) -> Head:
    with WithoutValues():
        return new_head(read_kind(files), config, ids)


def lost_values(weight: Tensor) -> int:
    """Return how many values are not finite."""
    return int((~weight.float().isfinite()).sum())


def is_exported_head(path: Path) -> bool:
    """Say whether the folder holds an exported head, so that a new one may take its place."""
    try:
        config = read_json(path / "config.json", made_by=MAKE_HEAD)
    except (InputError, OSError):
        return False
    of_eagle3 = config.get("architectures") == [EAGLE3.architecture]
    return config.get("speculators_model_type") == "eagle3" or KIND in config or of_eagle3
