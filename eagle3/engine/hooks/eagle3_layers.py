"""The forward hooks that capture hidden states inside SGLang 0.5.17 to 0.5.20: on the captured layers themselves.

From 0.5.23 on eagle3_capture.py alone does it, and this file can go once older versions are no longer supported.
Shapes: N rows of a batch, H hidden size.
"""

import torch
from eagle3_capture import Writer, unless_failed, write_rows

_batch: dict = {}  # slot → (N, H), the residual stream after a captured layer in the current forward


def layer(config: dict):
    """Return the hook of one captured layer: it keeps what goes into the next layer."""

    def keep(module, args, output):
        hidden, residual = (*output, None)[:2] if isinstance(output, tuple) else (output, None)
        if getattr(hidden, "_sglang_needs_allreduce_fusion", False):
            raise RuntimeError("an all-reduce is fused into the next layer: each GPU holds a part of the states")
        if torch.is_tensor(hidden) and hidden.ndim == 2:
            _batch[config["slot"]] = hidden if residual is None else hidden + residual

    return unless_failed(config, keep)


def logits(config: dict):
    """Return the hook of the logits processor: it writes what the layers' hooks kept."""
    writer = Writer(config)

    def capture(module, args, output):
        aux = [_batch.get(slot) for slot in range(config["slots"])]
        _batch.clear()
        write_rows(writer, aux, *args[1:4])

    return unless_failed(config, capture)
