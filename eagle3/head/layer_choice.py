"""Which layer a run trains with: config key `layer`."""

import logging
from functools import partial
from importlib.util import find_spec

import torch

from eagle3.errors import InputError
from eagle3.head.draft_head import HeadConfig
from eagle3.head.fused_layer import FusedLayer
from eagle3.head.layer import MakeLayer, PlainLayer
from eagle3.head.products import Float8Products, float8_obstacle

log = logging.getLogger(__name__)

NAMES = ("auto", "fused", "fused_fp8", "plain")


def require_known_layer(name: str) -> None:
    if name not in NAMES:
        raise InputError(f"layer={name} is none of {', '.join(NAMES)}; layer=auto takes the fastest that can run")


def choose_layer(name: str, *, device: torch.device, precision: str, config: HeadConfig) -> MakeLayer:
    """The layer of that name; `auto` takes the fused one on a GPU that can run it, and the log says which and why.

    `precision` is the trainer's, e.g. "bf16-mixed". InputError where the named one cannot run.
    """
    require_known_layer(name)
    obstacle = _obstacle(device)
    if name == "auto":
        name = "plain" if obstacle or device.type != "cuda" else "fused"
        why = "the fastest of all" if name == "fused" else f"fused {obstacle or 'pays on a GPU alone'}"
        log.info("layer=auto takes %s: %s", name, why)
    elif name != "plain" and obstacle:
        raise InputError(f"layer={name} {obstacle}; layer=plain runs everywhere")
    if name == "fused_fp8":
        obstacle = float8_obstacle(device, precision, _sizes(config))
        if obstacle:
            raise InputError(f"layer=fused_fp8 {obstacle}; layer=fused multiplies in the trainer's precision")
        return partial(FusedLayer, make_products=Float8Products)
    return FusedLayer if name == "fused" else PlainLayer


def _obstacle(device: torch.device) -> str | None:
    """Why this run cannot use the fused layer; None if it can, as it always can on the CPU."""
    if device.type == "cuda" and torch.__version__ < "2.10":
        return f"needs PyTorch 2.10 or newer on a GPU, this is {torch.__version__}"
    if device.type == "cuda" and not find_spec("triton"):
        return "needs Triton on a GPU (a part of PyTorch's CUDA builds for Linux)"
    return None


def _sizes(config: HeadConfig) -> dict[str, int]:
    """Of the layer's weights, but fc's."""
    return {
        "the target's hidden size": config.hidden_size,
        "model.intermediate_size": config.intermediate_size,
        "model.num_heads x model.head_dim": config.num_heads * config.head_dim,
        "model.num_kv_heads x model.head_dim": config.num_kv_heads * config.head_dim,
    }
