"""Chooses the implementation of each part of a training step: config group `kernels`.

Every part has a reference implementation; the fast ones in fast/ must match it.
"""

import logging
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec

import torch

from eagle3.errors import InputError
from eagle3.head.attention import MakeAttention, PaddedAttention
from eagle3.head.divergence import SOFT_CROSS_ENTROPY, Divergence
from eagle3.head.draft_head import HeadConfig
from eagle3.head.fast.chain_keys import ChainKeys
from eagle3.head.fast.chunked_loss import ChunkedLoss, LossKernel, plain_loss_and_gradient
from eagle3.head.fast.elementwise import Elementwise
from eagle3.head.fast.flash_attention import FlashAttention
from eagle3.head.fast.flash_kernels import FASTEST_FIRST, flash_kernel, flash_obstacle
from eagle3.head.fast.fused_layer import FusedLayer
from eagle3.head.fast.products import Float8Products, MakeProducts, Products, float8_obstacle
from eagle3.head.head import HeadSizes
from eagle3.head.layer import MakeLayer, PlainLayer
from eagle3.head.loss import ComputeLoss, plain_loss
from eagle3.settings.training import KernelSettings

log = logging.getLogger(__name__)

# The fastest first: auto takes the first without an obstacle.
OPTIONS = {"attention": (*FASTEST_FIRST, "padded"), "layer": ("fused", "plain"), "loss": ("chunked", "plain")}
RECORDABLE = {"attention": "triton", "layer": "fused", "loss": "chunked"}  # in a CUDA graph: the host reads no sizes
HOST_BOUND = 2048  # hidden size up to which the host, not the GPU, bounds a step (benchmarks/results/small_heads.json)


@dataclass(frozen=True)
class KernelPlan:
    """Implementation of each part; the reference one by default. A kind of head may ignore parts."""

    attention: MakeAttention = PaddedAttention
    layer: MakeLayer = PlainLayer
    loss: ComputeLoss = plain_loss
    cuda_graphs: bool = False  # whether a step is recorded once and replayed (training/step_graphs.py)


@dataclass(frozen=True)
class KernelBackend:
    """Kernels that the fast parts call: all in Triton, or all in PyTorch."""

    elementwise: Elementwise
    chain_keys: ChainKeys
    loss: LossKernel


def triton_obstacle(device: torch.device) -> str | None:
    """Return why Triton cannot run here; None if it can."""
    if device.type != "cuda":
        return f"Triton needs a CUDA GPU, this run is on the {device.type.upper()}"
    return None if find_spec("triton") else "Triton, a part of PyTorch's CUDA builds for Linux, is not installed"


def kernel_backend(device: torch.device, divergence: Divergence = SOFT_CROSS_ENTROPY) -> KernelBackend:
    if triton_obstacle(device):
        return KernelBackend(Elementwise(), ChainKeys(), plain_loss_and_gradient)
    from eagle3.head.fast.chain_keys_kernel import TritonChainKeys
    from eagle3.head.fast.elementwise_kernels import TritonElementwise
    from eagle3.head.fast.loss_kernel import triton_loss_and_gradient

    loss = triton_loss_and_gradient if divergence == SOFT_CROSS_ENTROPY else plain_loss_and_gradient
    return KernelBackend(TritonElementwise(), TritonChainKeys(), loss)


def choose_kernels(
    settings: KernelSettings,
    *,
    device: torch.device,
    precision: str,
    config: HeadSizes,
    divergence: Divergence = SOFT_CROSS_ENTROPY,
    layer_obstacle: str | None = None,
    graphs_obstacle: str | None = None,
) -> KernelPlan:
    """Return the plan, and log it as a table: what runs, and why faster options do not.

    `precision` is the trainer's, e.g. "bf16-mixed"; the two obstacles are what the caller has against the fused layer
    and CUDA graphs.
    Raises InputError if a named part, float8, or CUDA graphs cannot run.
    """
    no_triton = triton_obstacle(device)
    head_dim = getattr(config, "head_dim", 0)  # of a kind without attention: the plan's is not used
    obstacles = {
        "attention": {name: flash_obstacle(name, device, precision, head_dim) for name in FASTEST_FIRST},
        # Without Triton it runs only if it is named.
        "layer": {"fused": layer_obstacle or (no_triton if settings.layer == "auto" and not settings.fp8 else None)},
        "loss": {},
    }
    chosen, rows = {}, []
    for part, options in OPTIONS.items():
        chosen[part], why = _choose(part, getattr(settings, part), options, obstacles[part])
        rows.append((part, chosen[part], why))
    if settings.fp8 and (obstacle := float8_obstacle(device, precision, _sizes(config))):
        raise InputError(f"kernels.fp8=true {obstacle}; kernels.fp8=false multiplies in the trainer's precision")
    rows.append(("matmuls", "float8" if settings.fp8 else precision, f"kernels.fp8={str(settings.fp8).lower()}"))
    graphs, why = _choose_graphs(settings.cuda_graphs, chosen, device, config, graphs_obstacle)
    rows.append(("launch", "by graph" if graphs else "one by one", why))
    rows.append(("elementwise", "PyTorch" if no_triton else "Triton", no_triton or "the fastest"))
    if chosen["loss"] == "chunked" and not no_triton and divergence != SOFT_CROSS_ENTROPY:
        given = f"here loss.divergence is {type(divergence).__name__}"
        rows.append(("loss kernel", "PyTorch", f"Triton's kernel is for loss=soft_cross_entropy, {given}"))
    log.info("kernels:\n%s", "\n".join(f"  {part:<11} {runs:<12} {why}" for part, runs, why in rows))
    return _plan(settings, chosen, kernel_backend(device, divergence), graphs)


def _choose(part: str, name: str, options: tuple[str, ...], obstacles: dict[str, str | None]) -> tuple[str, str]:
    """Return the option that runs, and why."""
    if name != "auto":
        if obstacles.get(name):
            raise InputError(
                f"kernels.{part}={name} {obstacles[name]}; kernels.{part}=auto takes the fastest that can run"
            )
        return name, f"kernels.{part}={name}"
    name = next(each for each in options if not obstacles.get(each))
    reasons: dict[str | None, list[str]] = {}
    for each in options[: options.index(name)]:
        reasons.setdefault(obstacles[each], []).append(each)
    return name, "; ".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items()) or "the fastest"


def _choose_graphs(
    wanted: bool | str, chosen: dict[str, str], device: torch.device, config: HeadSizes, obstacle: str | None
) -> tuple[bool, str]:
    """Return whether steps run as CUDA graphs, and why."""
    if wanted is False:
        return False, "kernels.cuda_graphs=false"
    for part, recordable in RECORDABLE.items():
        if chosen[part] != recordable:
            obstacle = f"CUDA graphs need kernels.{part}={recordable}, here it is {chosen[part]}"
    if device.type != "cuda":
        obstacle = f"CUDA graphs need a CUDA GPU, this run is on the {device.type.upper()}"
    if obstacle and wanted is True:
        raise InputError(f"kernels.cuda_graphs=true: {obstacle}; kernels.cuda_graphs=auto runs without them")
    if wanted == "auto" and not obstacle and config.hidden_size > HOST_BOUND:
        obstacle = f"above a hidden size of {HOST_BOUND} the GPU is busy without them"
    return obstacle is None, obstacle or "kernels of small heads are faster than their launches"


def _plan(settings: KernelSettings, chosen: dict[str, str], kernels: KernelBackend, graphs: bool) -> KernelPlan:
    elementwise = kernels.elementwise
    make_products: MakeProducts = partial(Float8Products, elementwise=elementwise) if settings.fp8 else Products
    plan = KernelPlan(cuda_graphs=graphs)
    if chosen["attention"] in FASTEST_FIRST:
        kernel = flash_kernel(chosen["attention"])
        plan = replace(plan, attention=partial(FlashAttention, kernel=kernel, chain_keys=kernels.chain_keys))
    if chosen["layer"] == "fused":
        plan = replace(plan, layer=partial(FusedLayer, elementwise=elementwise, make_products=make_products))
    if chosen["loss"] == "chunked":
        loss = ChunkedLoss(
            chunk=settings.loss_chunk, elementwise=elementwise, kernel=kernels.loss, make_products=make_products
        )
        plan = replace(plan, loss=loss)
    return plan


def _sizes(config: HeadSizes) -> dict[str, int]:
    """Return the sizes by name of all weights that may be float8: of a kind of your own, those of lm_head."""
    sizes = {"the target's hidden size": config.hidden_size}
    if isinstance(config, HeadConfig):
        sizes |= {
            "model.intermediate_size": config.intermediate_size,
            "model.num_heads x model.head_dim": config.num_heads * config.head_dim,
            "model.num_kv_heads x model.head_dim": config.num_kv_heads * config.head_dim,
        }
    return sizes | {"model.draft_vocab_size": config.draft_vocab_size}
