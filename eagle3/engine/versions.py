"""The SGLang that launch.python finds, and how hidden states are captured in each of its versions.

Answers need only SGLang's public interface, from 0.5.17 on. Hidden states are captured in one of two ways:

- 0.5.17 to 0.5.20: forward hooks on the captured decoder layers (hooks/eagle3_layers.py).
- 0.5.23 and later: SGLang hands the captured states to its logits processor, where one forward hook reads them
  (hooks/eagle3_capture.py).

Between them neither works: from 0.5.21 on the layers of some families return only what the layer adds to the residual
stream, and the flags of the second way do not exist yet. The wheels of 0.5.17 to 0.5.23 were read for this module.
"""

import json
import logging
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from eagle3.adapters.library import numbers
from eagle3.errors import InputError
from eagle3.settings.engine import LaunchSettings

log = logging.getLogger(__name__)

OLDEST = (0, 5, 17)  # the oldest whose flags and answers this project knows
NO_CAPTURE = ((0, 5, 21), (0, 5, 22))
LOGITS_HOOK = (0, 5, 23)  # from here on the logits processor gets the captured states
NEWEST = (0, 5, 23)  # the latest version checked
INSTALL = (
    "install it there or, better, in an environment of its own (pip install 'sglang[all]==0.5.17'), and name that with "
    "launch.python=PYTHON"
)
INSTALL_TO_CAPTURE = "install SGLang 0.5.17 in the environment of launch.python, or take features=huggingface"

# model_type of the text part of targets whose classes take the layer ids of a head for outputs of layers only if the
# first is 1: set_eagle3_layers_to_capture of DeepseekV2ForCausalLM and Glm4MoeLiteForCausalLM. The first is also the
# class of kimi_k2, glm_moe_dsa and Mistral Large 3, and the text part of kimi_k25, kimi_vl and dots_vlm.
IDS_BY_FIRST = ("deepseek", "kimi", "glm_moe_dsa", "glm4_moe_lite", "dots_vlm", "mistral_large")

# Neither imports sglang: that takes half a minute, and the log of a failed start says what is wrong with it.
PROBE = """
import importlib.metadata, importlib.util
print(importlib.metadata.version("sglang") if importlib.util.find_spec("sglang") else "")
"""
GPUS = "import torch; print(torch.cuda.device_count())"

# The part of SGLang's /server_info that results keep; in 0.5.17 it returns all server_args and more.
REPORTED = (
    "version", "model_path", "dtype", "tp_size", "attention_backend", "sampling_backend", "mem_fraction_static",
    "max_running_requests", "cuda_graph_max_bs_decode", "disable_radix_cache", "disable_overlap_schedule",
    "speculative_algorithm", "speculative_draft_model_path", "speculative_num_steps", "speculative_eagle_topk",
    "speculative_num_draft_tokens", "speculative_draft_window_size",
)  # fmt: skip


def find_sglang(settings: LaunchSettings) -> str:
    """Return the version of launch.python's SGLang; InputError if it is missing or too old."""
    named = f"launch.python={settings.interpreter}"
    version = _run(settings.interpreter, settings.environment, PROBE)
    if not version:
        raise InputError(f"{named} has no SGLang; {INSTALL}")
    if numbers(version) < OLDEST:
        raise InputError(f"{named} has SGLang {version}, the oldest supported is 0.5.17; {INSTALL}")
    return version


def count_gpus(settings: LaunchSettings, *, servers: int = 1) -> int:
    """Return how many GPUs the PyTorch of launch.python sees; InputError if these servers need more."""
    gpus = _visible_gpus(settings.interpreter, tuple(settings.environment.items()))
    if gpus < servers * settings.tp_size:
        each = f" for each of {servers} servers" if servers > 1 else ""
        fewer = ", answers.servers or features.engine.servers" if servers > 1 else ""
        raise InputError(
            f"launch.tp_size={settings.tp_size}{each}: PyTorch of {settings.interpreter} sees {gpus} GPUs; run this on "
            f"a machine that has them, lower launch.tp_size{fewer}, or set CUDA_VISIBLE_DEVICES"
        )
    return gpus


@cache  # importing PyTorch takes seconds, and a stage asks before it loads anything and when it starts servers
def _visible_gpus(interpreter: str, environment: tuple[tuple[str, str], ...]) -> int:
    return int(_run(interpreter, dict(environment), GPUS))


def _run(interpreter: str, environment: dict[str, str], code: str) -> str:
    """Return the last line that Python code prints in the server's environment."""
    named = f"launch.python={interpreter}"
    command = [interpreter, "-c", code]
    try:
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    except OSError as error:
        raise InputError(f"{named} cannot be run: {error.strerror}; name a Python interpreter") from None
    if ran.returncode:
        reason = (ran.stderr.strip() or f"exit status {ran.returncode}").splitlines()[-1]
        raise InputError(f"{named} has no working SGLang ({reason}); {INSTALL}")
    return ran.stdout.splitlines()[-1]


def require_capture(version: str) -> None:
    """Raise InputError unless hidden states can be captured in this version."""
    if numbers(version) in NO_CAPTURE:
        raise InputError(
            f"features.engine: hidden states cannot be captured in SGLang {version}: not all of its layers return the "
            f"residual stream, and it has no --enable-return-aux-hidden-states yet; {INSTALL_TO_CAPTURE}"
        )
    if numbers(version) > NEWEST:
        log.warning("features.engine: SGLang %s is newer than 0.5.23, the latest version checked; if it does not "
                    "start, or its hidden states are refused, install 0.5.17", version)  # fmt: skip


def takes_ids_for_inputs(model_type: str, layer_ids: Sequence[int]) -> bool:
    """Say whether SGLang captures the inputs of a head's `layer_ids`, where it takes them for outputs as a rule."""
    return model_type.startswith(IDS_BY_FIRST) and layer_ids[0] != 1


def capture_flags(
    version: str, layers: Sequence[int], folder: Path, *, dtype: str, batch_tokens: int, most_bytes: int
) -> dict[str, Any]:
    """Return the flags of a server that writes the hidden states of our requests into `folder`.

    `layers` are indices into Hugging Face's `hidden_states`: what goes into layer i, which layer i - 1 puts out."""
    common = {"folder": str(folder), "dtype": dtype, "most_bytes": most_bytes, "slots": len(layers)}
    own = {
        "disable-radix-cache": True,  # cached tokens are not computed again
        "cuda-graph-backend-prefill": "disabled",  # hooks do not run in a replayed graph
        "cuda-graph-max-bs-decode": 1,  # nothing is decoded after the first token
        "chunked-prefill-size": batch_tokens,
    }
    if numbers(version) < LOGITS_HOOK:
        hooks = []
        for slot, layer in enumerate(layers):
            modules = [f"*{name}.{layer - 1}" for name in ("layers", ".h", "blocks")]
            hooks.append(_hook(f"layer {layer}", modules, "eagle3_layers:layer", {**common, "slot": slot}))
        hooks.append(_hook("logits", ["*logits_processor"], "eagle3_layers:logits", common))
        return {"forward-hooks": json.dumps(hooks), **own}
    return {
        "forward-hooks": json.dumps([_hook("logits", ["*logits_processor"], "eagle3_capture:logits", common)]),
        "speculative-algorithm": "EAGLE3",  # names the convention of the layer ids; nothing is drafted
        "enable-return-aux-hidden-states": True,
        "return-aux-hidden-state-layer-ids": [layer - 1 for layer in layers],  # outputs of layers
        **own,
    }


def _hook(name: str, modules: list[str], factory: str, config: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "target_modules": modules, "hook_factory": factory, "config": config}
