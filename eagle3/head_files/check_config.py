"""Checks of config.json: what SGLang builds from it, and what it would leave out."""

import math
from collections.abc import Iterator

from eagle3.head.eagle3 import EAGLE3, has_norm_before_fc, read_rope
from eagle3.head_files.files import ARCHITECTURE, NESTED, HeadFiles
from eagle3.head_files.finding import Level, Problem, TargetFacts
from eagle3.head_files.format import VOCABULARY_MAPS, head_config, read_kind
from eagle3.head_files.servers import obstacles, summary
from eagle3.target.facts import context_factor


def check_servers(files: HeadFiles, facts: TargetFacts) -> Iterator[Problem]:
    """SGLang, vLLM and llama.cpp can serve the head."""
    of_sglang, *of_others = obstacles(files).values()
    unservable = all([of_sglang, *of_others])
    launched = facts.launch_dtype is not None  # by SGLang
    yield "error" if launched and of_sglang else "warning" if unservable else "ok", summary(files)


def check_layout(files: HeadFiles, facts: TargetFacts) -> Iterator[Problem]:
    """config.json is laid out as SGLang reads it."""
    if files.nested:
        yield (
            "error",
            f"config.json is in the layout of vLLM's speculators, which SGLang does not start with: move the keys of "
            f'{NESTED} to the top level, set architectures=["{ARCHITECTURE}"], model_type=llama and '
            f"tie_word_embeddings=false, and remove keys that are null; or serve it with vLLM",
        )


def check_model(files: HeadFiles, facts: TargetFacts) -> Iterator[Problem]:
    """Architecture and sizes match what a server builds for this target."""
    config = files.config
    for key in ("hidden_size", "vocab_size"):
        if config.get(key) != getattr(facts.config, key):
            sizes = f"{key}={config.get(key)}, this target has {getattr(facts.config, key)}"
            yield "error", f"{sizes}: it is a head of another target; give the target that it was trained on"
    head_config(files)  # first: advice to rename a head would be wrong where it is another one
    if read_kind(files) is not EAGLE3:  # check_servers says that no server knows it
        return
    if config.get("architectures") != [ARCHITECTURE]:
        found = config.get("architectures")
        yield "error", f"architectures={found}: SGLang would build another model; set it to ['{ARCHITECTURE}']"
    if config.get("model_type") != "llama":
        yield "error", f"model_type={config.get('model_type')}: SGLang's head needs a llama config; set it to llama"
    if config.get("tie_word_embeddings"):
        yield "error", "tie_word_embeddings=true: SGLang drafts with the target's embedding as lm_head; set it false"
    if config.get("hidden_act", "silu") != "silu":
        yield (
            "error",
            f"hidden_act={config['hidden_act']}: SGLang supports only silu and will not start; choose another head, or "
            f"set it to silu if the head was trained with that",
        )


def check_options(files: HeadFiles, facts: TargetFacts) -> Iterator[Problem]:
    """config.json asks for nothing that SGLang's draft layer does not compute."""
    config = files.config
    if has_norm_before_fc(config):
        yield (
            "warning",
            "norm_before_fc=true: SGLang computes it from 0.5.17 on, older versions drop input_norm.weight and draft "
            "from un-normed states; serve the head with 0.5.17 or later, or with vLLM",
        )
    if "target_hidden_size" in config and config["target_hidden_size"] is None:
        yield "error", "target_hidden_size=null: SGLang multiplies by it and does not start; remove the key"
    rotated = (read_rope(config) or {}) | config  # transformers 5 writes the factor into rope_parameters
    if rotated.get("partial_rotary_factor", 1) not in (None, 1) or config.get("rope_is_neox_style") is False:
        named = [f"{key}={rotated[key]}" for key in ("partial_rotary_factor", "rope_is_neox_style") if key in rotated]
        yield (
            "error",
            f"{', '.join(named)}: SGLang rotates the head's channels so, heads of EAGLE-3 are trained with all of them "
            f"in halves; remove the key, or serve the head where it was trained to be",
        )
    window = config.get("sliding_window")
    if window and "sliding_attention" in (config.get("layer_types") or []):
        yield (
            "warning",
            f"layer_types=[sliding_attention], sliding_window={window}: the head was trained to attend to the last "
            f"{window} tokens, SGLang attends to all; for longer texts serve it with draft_window={window}",
        )
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            yield "error", f"{key}=true: of biases SGLang keeps o_proj's alone; train without them and set it to false"


def check_residual(files: HeadFiles, facts: TargetFacts) -> Iterator[Problem]:
    """The layer adds to its state as it is, as SGLang's does."""
    if files.config.get("norm_before_residual"):
        yield (
            "error",
            "norm_before_residual=true: SGLang does not read it and adds the un-normed state, so the head computes "
            "something else than in training; train with norm_before_residual=false, or serve it with vLLM",
        )


def check_norm_output(files: HeadFiles, facts: TargetFacts) -> Iterator[Problem]:
    """The next draft gets the state that the training gave it.

    SpecForge's norm_output said from May to September 2026 whether lm_head gets the normed state, and the next draft
    always got the other one: sgl-project/SpecForge, pull requests 568 and 879."""
    stated = files.config.get("norm_output")
    if stated is None or files.record is not None or files.written.get("architectures") != [ARCHITECTURE]:
        return
    by_specforge = "but a head of SpecForge from before its pull request 879 (September 2026) was trained with"
    if stated:
        yield (
            "warning",
            f"norm_output=true: the next draft gets the normed state, {by_specforge} the state as it is; if this is "
            f"one, remove the key",
        )
    else:
        yield (
            "warning",
            f"norm_output=false: lm_head gets the normed state, {by_specforge} the state as it is, which no server "
            f"computes; if this is one, choose another head",
        )


def check_rope(files: HeadFiles, facts: TargetFacts) -> Iterator[Problem]:
    """RoPE is stated, and is the target's unless the training is recorded."""
    stated, expected = read_rope(files.config), read_rope({"rope_parameters": facts.config.rope_parameters})
    older = read_rope({key: value for key, value in files.config.items() if key != "rope_parameters"})
    if stated is None:
        yield "error", f"rope_theta is missing: SGLang assumes 10000; set rope_parameters to {expected}"
    elif older not in (None, stated):
        yield "error", f"rope_theta and rope_scaling say {older}, rope_parameters {stated}; make them agree"
    elif stated != expected and files.record is None:
        yield "warning", f"RoPE {stated} is not the target's, {expected}: if the head was trained with that, set it"


def check_context(files: HeadFiles, facts: TargetFacts) -> Iterator[Problem]:
    """max_position_embeddings, times the factor of RoPE if it has one, covers the target's context."""
    stated, factor = files.config.get("max_position_embeddings") or 0, context_factor(read_rope(files.config) or {})
    length = int(stated * factor)
    needed = int(facts.config.max_position_embeddings * context_factor(facts.config.rope_parameters))
    if length < needed:
        yield (
            "error",
            f"max_position_embeddings={stated} makes a context of {length}, which is less than the target's {needed}: "
            f"SGLang does not start unless --context-length is {length} or less; set it to "
            f"{math.ceil(needed / factor)}",
        )
    trained = files.record.origin.tokens_of_99_percent if files.record else None
    if trained is not None and trained < needed <= length:
        window = max(64, trained)
        yield (
            "ok",
            f"the target reads up to {needed} tokens, but 99 % of the training texts have at most {trained}; a head "
            f"may draft worse in longer ones: compare there with and without compare.draft_window={window}",
        )


def check_dtype(files: HeadFiles, facts: TargetFacts) -> Iterator[Problem]:
    """The server runs the head in the target's dtype, which config.json and the tensors are in."""
    stated = files.config.get("dtype") or files.config.get("torch_dtype")
    stored = {
        str(tensor.dtype).removeprefix("torch.")
        for name, tensor in files.tensors.items()
        if name not in VOCABULARY_MAPS
    }
    if facts.dtype is None:
        yield "skipped", "the target's config.json names no dtype"
        return
    served = _runs_in(stated)
    if served != _runs_in(facts.dtype) and facts.launch_dtype in (None, "auto"):
        level: Level = "error" if facts.launch_dtype == "auto" or served != stated else "warning"
        set_it = "" if files.record else f"set it to {facts.dtype}, or "  # a record has the sha256 of config.json
        yield (
            level,
            f"dtype={stated}, the target's is {facts.dtype}: by itself SGLang runs the head in {served}, which the "
            f"target's states do not fit; {set_it}serve both with launch.dtype={facts.dtype}",
        )
    if stored - {stated} and stated is not None:
        found = ", ".join(sorted(stored))
        yield "warning", f"tensors are {found}: SGLang rounds them to the dtype that it runs the head in; store them so"


def _runs_in(dtype: str | None) -> str:
    """Return the dtype that SGLang runs a model in by itself."""
    return dtype if dtype in ("bfloat16", "float16") else "float16"
