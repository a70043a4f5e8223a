"""Servers that can serve a head: SGLang, vLLM and llama.cpp; and why the others cannot.

The reasons were read in SGLang 0.5.17 (models/llama_eagle3.py), vLLM 0.32.0 (models/llama_eagle3.py,
transformers_utils/configs/speculators, v1/worker/gpu_model_runner.py) and llama.cpp b11434 (conversion/llama.py,
src/models/eagle3.cpp). benchmarks/peers/outside_servers.py serves heads with the last two.
"""

from collections.abc import Iterator

from eagle3.errors import InputError
from eagle3.head.eagle3 import EAGLE3, has_fc_norm
from eagle3.head.kind import Kind
from eagle3.head_files.files import LAYER_IDS, HeadFiles, layer_id_entries
from eagle3.head_files.format import read_kind

LLAMA_CPP_LAYERS = 3
SGLANG, VLLM, LLAMA_CPP = "SGLang", "vLLM", "llama.cpp"


def obstacles(files: HeadFiles) -> dict[str, list[str]]:
    """Return by server why it cannot serve the head as it was trained; nothing where it can."""
    kind = read_kind(files)
    if kind is not EAGLE3:
        unknown = [f"it does not know heads of kind {kind.name}"]
        return {SGLANG: [] if kind.sglang_algorithm else unknown, VLLM: unknown, LLAMA_CPP: unknown}
    return {SGLANG: [*_of_sglang(files)], VLLM: [*_of_vllm(files)], LLAMA_CPP: [*_of_llama_cpp(files)]}


def require_server(kind: Kind, head: object) -> str:
    """Return SGLang's name of how heads of this kind draft; InputError if no server can serve them."""
    if kind.sglang_algorithm is None:
        raise InputError(
            f"head={head}: no server can serve heads of kind {kind.name}; decode with them: action=decode or "
            f"action=show"
        )
    return kind.sglang_algorithm


def summary(files: HeadFiles) -> str:
    """Return a line such as `SGLang and vLLM can serve this head; llama.cpp cannot: it has no fc_norm`."""
    kind, found = read_kind(files), obstacles(files)
    if kind.sglang_algorithm is None:
        return f"no server can serve heads of kind {kind.name}"
    *others, last = [server for server, reasons in found.items() if not reasons] or ["none of " + ", ".join(found)]
    able = f"{', '.join(others)} and {last}" if others else last
    return "; ".join(
        [f"{able} can serve this head"]
        + [f"{server} cannot: {', '.join(reasons)}" for server, reasons in found.items() if reasons]
    )


def _of_sglang(files: HeadFiles) -> Iterator[str]:
    if files.nested:
        yield "it does not read the speculators' layout (action=check says which keys to move)"
    if files.config.get("norm_before_residual"):
        yield "it has no norm_before_residual"


def _of_vllm(files: HeadFiles) -> Iterator[str]:
    if files.nested and "model_type" in files.written:
        yield "it does not recognise the speculators' layout with a model_type (remove that key from config.json)"
    ids = files.layer_ids
    if not files.nested and ids is not None and not files.top_level_ids:
        yield f"it takes {ids} for inputs of layers, one too low (set {layer_id_entries([layer + 1 for layer in ids])})"
    if "d2t" in files.tensors and files.config.get("draft_vocab_size") == files.config.get("vocab_size"):
        yield "it stops at a d2t of the whole vocabulary (remove d2t and t2d if the draft ids are the target's)"


def _of_llama_cpp(files: HeadFiles) -> Iterator[str]:
    options = {"fc_norm": has_fc_norm(files.config), "norm_output": bool(files.config.get("norm_output"))}
    if missing := [option for option, used in options.items() if used]:
        yield f"it has no {' and no '.join(missing)} (train with model=eagle3)"
    number = files.config.get("num_aux_hidden_states") or LLAMA_CPP_LAYERS
    if number != LLAMA_CPP_LAYERS:
        yield f"it reads exactly {LLAMA_CPP_LAYERS} captured layers, not {number}"
    if files.layer_ids and not files.top_level_ids:
        yield f"it finds no {LAYER_IDS} at the top level and takes its default layers"
