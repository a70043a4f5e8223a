"""Which layer a run trains with: config key `layer`."""

import logging
from functools import partial

import torch

from eagle3.errors import InputError
from eagle3.head.draft_head import HeadConfig
from eagle3.head.fast.fused_layer import FusedLayer
from eagle3.head.fast.kernel_choice import runs_triton
from eagle3.head.fast.products import Float8Products, float8_obstacle
from eagle3.head.layer import MakeLayer, PlainLayer

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
    if name == "auto":
        name = "fused" if runs_triton(device, torch.float32) else "plain"
        log.info("layer=auto takes %s: fused pays on a GPU with Triton, this is %s", name, device.type.upper())
    if name == "fused_fp8":
        obstacle = float8_obstacle(device, precision, _sizes(config))
        if obstacle:
            raise InputError(f"layer=fused_fp8 {obstacle}; layer=fused multiplies in the trainer's precision")
        return partial(FusedLayer, make_products=Float8Products)
    return FusedLayer if name == "fused" else PlainLayer


def _sizes(config: HeadConfig) -> dict[str, int]:
    """Of the layer's weights, but fc's."""
    return {
        "the target's hidden size": config.hidden_size,
        "model.intermediate_size": config.intermediate_size,
        "model.num_heads x model.head_dim": config.num_heads * config.head_dim,
        "model.num_kv_heads x model.head_dim": config.num_kv_heads * config.head_dim,
    }
