"""The command line of an SGLang server. Flag names and defaults are those of SGLang 0.5.17 to 0.5.23."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eagle3.errors import InputError
from eagle3.secrets import SAYS_SECRET
from eagle3.settings.engine import LaunchSettings
from eagle3.settings.serving import Drafting
from eagle3.target.files import TargetFiles

REFUSED = {
    "host": "set launch.host instead",
    "port": "set launch.port instead",
    "api-key": "everybody can read a command line; set EAGLE3_API_KEY in the environment instead",
    "admin-api-key": "the prefix cache is emptied without one; EAGLE3_API_KEY in the environment is for all",
    # What is checked here, and what results say was measured; the second names are SGLang's aliases of ours.
    **dict.fromkeys(("model-path", "model"), "set target.path instead"),
    "revision": "set target.revision instead",
    **dict.fromkeys(("tp", "tensor-parallel-size"), "set launch.tp_size instead"),
    **dict.fromkeys(("speculative-draft-model-path", "speculative-draft-model"), "set head instead"),
    "speculative-num-steps": "set steps instead",
    "speculative-eagle-topk": "set topk instead",
    "speculative-num-draft-tokens": "set draft_tokens instead",
}
ROUNDING = ("quantization", "torchao-config", "kv-cache-dtype")


@dataclass(frozen=True, kw_only=True)
class Draft(Drafting):
    """An exported head and how it drafts. `draft_tokens` counts the tree's root; None is for a chain: steps + 1.

    The head attends to the last `draft_window` tokens (None: all)."""

    head: str
    algorithm: str | None = "EAGLE3"  # SGLang's name of how its kind of head drafts; None: no server serves it
    draft_window: int | None = None


def launch_command(
    settings: LaunchSettings, target: TargetFiles, draft: Draft | None, flags: Mapping[str, Any] | None = None
) -> list[str]:
    """Return the command that serves `target`, without a head if `draft` is None.

    `flags` are what the caller needs besides; launch.extra_flags override all others."""
    flags = _server_flags(settings, target) | (draft_flags(draft) if draft else {}) | dict(flags or {})
    flags |= _extra_flags(settings, speculative=draft is not None)
    return [settings.interpreter, "-m", "sglang.launch_server", *command_words(flags)]


def shell_line(settings: LaunchSettings, command: list[str]) -> str:
    """Return a line to paste: the variables of `launch.env`, then the command.

    Variables that may be secret are named only; their values have to be in the shell."""
    variables = [
        f'{name}="${name}"' if SAYS_SECRET.search(name) else f"{name}={shlex.quote(str(value))}"
        for name, value in (settings.env or {}).items()
    ]
    return " ".join([*variables, shlex.join(command)])


def _server_flags(settings: LaunchSettings, target: TargetFiles) -> dict[str, Any]:
    return {
        "model-path": target.path,
        "revision": target.revision,
        "host": settings.host,
        "port": settings.port,
        "dtype": settings.dtype,
        "tp-size": settings.tp_size,
        "mem-fraction-static": settings.mem_fraction_static,
        "max-running-requests": settings.max_running_requests,
        "cuda-graph-max-bs-decode": settings.cuda_graph_max_bs_decode,
        "disable-overlap-schedule": not settings.overlap_schedule,
        "trust-remote-code": settings.trust_remote_code,
    }


def draft_flags(draft: Draft) -> dict[str, Any]:
    # Without all three numbers SGLang refuses some and chooses others by the target's class.
    steps, topk, tokens = draft.shape
    return {
        "speculative-algorithm": draft.algorithm,
        "speculative-draft-model-path": draft.head,
        "speculative-draft-model-quantization": "unquant",  # else a head is loaded as the target's flag says
        "speculative-num-steps": steps,
        "speculative-eagle-topk": topk,
        "speculative-num-draft-tokens": tokens,
        "speculative-draft-window-size": draft.draft_window,
    }


def stated_dtype(settings: LaunchSettings) -> str | None:
    """Return the dtype that SGLang is told for target and head; None where it takes each one's own."""
    stated = _extra_flags(settings, speculative=True).get("dtype", settings.dtype)
    return None if stated in (None, "auto") else str(stated)


def computed_in(settings: LaunchSettings) -> str:
    """Return what decides the precision of a server's hidden states, as a feature store records it."""
    flags = {"dtype": settings.dtype} | _extra_flags(settings, speculative=False)
    rounding = [f"{name}={flags[name]}" for name in ROUNDING if flags.get(name)]
    return ", ".join([str(flags["dtype"]), *rounding])


def _extra_flags(settings: LaunchSettings, *, speculative: bool) -> dict[str, Any]:
    given = settings.extra_flags or {}
    flags = {name.removeprefix("--").replace("_", "-"): value for name, value in given.items()}
    for name, instead in REFUSED.items():
        if name in flags:
            raise InputError(f"launch.extra_flags holds {name}: {instead}")
    return {name: value for name, value in flags.items() if speculative or not name.startswith("speculative-")}


def require_windowed_attention(settings: LaunchSettings, draft: Draft) -> None:
    """Raise InputError for a draft window with Triton attention, whose draft steps after the first one lack it."""
    flags = _extra_flags(settings, speculative=True)
    backends = ("speculative-draft-attention-backend", "decode-attention-backend", "attention-backend")
    backend = next((name for name in backends if flags.get(name)), None)
    if draft.draft_window and backend and flags[backend] == "triton":
        raise InputError(
            f"draft_window={draft.draft_window}: SGLang 0.5.17 does not start with a window and {backend}=triton; "
            f"name another backend in launch.extra_flags, or set draft_window=null (launch.check=false tries it)"
        )


def command_words(flags: Mapping[str, Any]) -> list[str]:
    return [word for name, value in flags.items() for word in _words(name, value)]


def _words(name: str, value: Any) -> list[str]:
    if value is None or value is False:
        return []
    if value is True:
        return [f"--{name}"]
    if isinstance(value, dict):
        return [f"--{name}", json.dumps(value)]
    return [f"--{name}", *(map(str, value) if isinstance(value, list) else [str(value)])]
