"""What a training step must compute, how fast this machine multiplies matrices, and where a step's time goes.

Shapes: T tokens of a batch, R trained rows, K steps, P trained (row, step) pairs, H hidden size, D draft vocabulary.
"""

import re
import time
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from eagle3.head.draft_head import HeadConfig

GROUPS = {  # the first that is found in a kernel's (on the CPU: an operator's) name
    "attention": r"flash|fmha|attention|chain_keys",
    "loss and softmax": r"_one_pair|softmax|logsumexp|argmax|log_sum",
    "matrix products": r"gemm|nvjet|cutlass|xmma|cublas|aten::(mm|addmm|bmm|baddbmm)",
    "norms and elementwise": r"elementwise|norm|reduce|vectorized|CatArray|_rotate|_swiglu|_quantise|index|Memcpy|"
    r"Memset|fill|aten::",
}


def products(config: HeadConfig) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of the head's matrices."""
    hidden, query = config.hidden_size, config.num_heads * config.head_dim
    key_value = 2 * config.num_kv_heads * config.head_dim
    return {
        "fc": (3 * hidden, hidden),
        "q": (2 * hidden, query),
        "k and v": (2 * hidden, key_value),
        "o": (query, hidden),
        "gate and up": (hidden, 2 * config.intermediate_size),
        "down": (config.intermediate_size, hidden),
        "lm_head": (hidden, config.draft_vocab_size),
    }


def product_flops(config: HeadConfig, *, tokens: int, rows: int, pairs: int, trains_lm_head: bool) -> int:
    """Of the matrix products of forward and backward: 2 FLOP a weight and row, and 4 for its two gradients.

    Prompt rows need `fc`, k and v of step 0; `fc` has no gradient for its input; a teacher's logits have none at all. A
    fixed `lm_head` has no gradient of its weight.
    That is the head as in the paper: a layer that gets by with fewer is credited with all of them.
    """
    weights = {name: inputs * outputs for name, (inputs, outputs) in products(config).items()}
    in_every_step = sum(weights.values()) - weights["fc"]
    prompt_rows = tokens - rows
    fixed = 0 if trains_lm_head else 2 * pairs * weights["lm_head"]
    return (
        6 * pairs * in_every_step
        + 6 * prompt_rows * weights["k and v"]
        + 4 * tokens * weights["fc"]
        + 2 * rows * weights["lm_head"]
        - fixed
    )


def matrix_product_ceiling(config: HeadConfig, rows: int, device: torch.device, seconds_each: float) -> float:
    """TFLOP/s of the fastest of the head's own products on `rows` rows, each run alone.

    Every product is timed in its three forms: forward, gradient of the input, gradient of the weight.
    """
    best = 0.0
    for inputs, outputs in products(config).values():
        x, y, weight = (
            torch.randn(shape, device=device).bfloat16()
            for shape in ((rows, inputs), (rows, outputs), (outputs, inputs))
        )
        for left, right in ((x, weight.T), (y, weight), (y.T, x)):
            seconds = measure_seconds(lambda left=left, right=right: left @ right, seconds_each, device)
            best = max(best, 2.0 * rows * inputs * outputs / seconds)
    return best / 1e12


def measure_seconds(work: Callable[[], object], at_least: float, device: torch.device) -> float:
    """Seconds of one call, from as many as fill `at_least` seconds after a warm-up."""
    for _ in range(3):
        work()
    repeats = max(1, int(at_least / max(timed(work, 1, device), 1e-6)))
    return timed(work, repeats, device)


def timed(work: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Seconds of one call between two events on the GPU, of the wall clock on the CPU."""
    if device.type != "cuda":
        started = time.perf_counter()
        for _ in range(repeats):
            work()
        return (time.perf_counter() - started) / repeats
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(repeats):
        work()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / 1000 / repeats


def time_by_kernel(work: Callable[[], object], device: torch.device) -> list[tuple[str, float]]:
    """Names and milliseconds of the kernels (on the CPU: operators) of one call, slowest first."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as profiler:
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
    spent = []
    for event in profiler.key_averages():
        on_device = event.device_type.name == "CUDA"  # operators repeat the time of their kernels
        if on_device == (device.type == "cuda"):
            spent.append((event.key, (event.self_device_time_total if on_device else event.self_cpu_time_total) / 1000))
    return sorted((item for item in spent if item[1] > 0), key=lambda item: -item[1])


def kernel_group(kernel: str) -> str:
    return next((group for group, pattern in GROUPS.items() if re.search(pattern, kernel)), "other")
