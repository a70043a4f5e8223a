"""Captures what the draft head learns from: the residual stream into some layers of the target (arXiv:2503.01840,
section 3.1: a low, a middle and a high one), and its last hidden state.

Shapes: B batch, T padded tokens, T_b tokens of sample b, A captured layers, H hidden size, AH = A · H."""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from eagle3.adapters.transformers import layer_input
from eagle3.errors import InputError
from eagle3.target.facts import LogitTransform, logit_transforms, rope_depends_on_length
from eagle3.target.model import Target


def default_capture_layers(num_layers: int) -> list[int]:
    """Return the three layers whose inputs the head reads, as indices into Hugging Face's `hidden_states`."""
    return check_capture_layers([2, num_layers // 2, num_layers - 3], num_layers)


def check_capture_layers(layers: Sequence[int], num_layers: int) -> list[int]:
    """Return the layers, or raise InputError unless they ascend from 1 on and the target has them."""
    if num_layers < 2:
        raise InputError(f"the target has {num_layers} layers: a head reads states between two; choose another target")
    if not layers or list(layers) != sorted({*layers}) or not layers[0] >= 1 or not layers[-1] < num_layers:
        fitting = sorted({1, max(1, num_layers // 2), num_layers - 1})
        raise InputError(
            f"features.capture_layers={[*layers]} does not fit a target of {num_layers} layers: ascending indices "
            f"from 1 to {num_layers - 1}, usually three; set features.capture_layers={json.dumps(fitting)}"
        )
    return list(layers)


class Features(NamedTuple):
    """Features of a sample: the residual stream into the captured layers, low to high, and the final-normed state."""

    aux_hidden_states: Float[Tensor, "T_b AH"]
    last_hidden_state: Float[Tensor, "T_b H"]


class Capture:
    """Runs the target without its `lm_head`; keeps the inputs of `layers` and the last hidden of real tokens only."""

    def __init__(self, target: Target, layers: Sequence[int]) -> None:
        self.target = target
        self.layers = check_capture_layers(layers, len(target.layers))
        self.alone = rope_depends_on_length(target.text_config)

    @torch.no_grad()
    def __call__(self, input_ids: Int[Tensor, "B T"], lengths: Sequence[int]) -> list[Features]:
        """`input_ids` is padded on the right, with any id: in a causal model no real token looks there."""
        if self.alone and len(lengths) > 1:
            rows = zip(input_ids, lengths, strict=True)
            return [features for ids, length in rows for features in self(ids[None, :length], [length])]
        num_layers, hidden_size = len(self.layers), self.target.text_config.hidden_size
        aux = [self.target.embedding.new_empty(length, num_layers, hidden_size) for length in lengths]
        computed: set[nn.Module] = set()
        with ExitStack() as hooks:
            for slot, layer in enumerate(self.layers):
                keep = partial(_keep_input, [sample[:, slot] for sample in aux], computed)
                hooks.callback(self.target.layers[layer].register_forward_pre_hook(keep, with_kwargs=True).remove)
            output = self.target.decoder(input_ids=input_ids.to(self.target.device), use_cache=False)
        if skipped := [layer for layer in self.layers if self.target.layers[layer] not in computed]:
            raise InputError(
                f"features.capture_layers={self.layers}: the target reads texts without its layers {skipped}, as those "
                f"of Llama 3.2 Vision for images; choose others"
            )
        last = [
            hidden[:length].to(self.target.device, copy=True)  # a view would hold on to the padding
            for hidden, length in zip(output.last_hidden_state, lengths, strict=True)
        ]
        return [Features(*pair) for pair in zip((sample.flatten(1) for sample in aux), last, strict=True)]


def _keep_input(
    places: list[Tensor], computed: set[nn.Module], layer: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> None:
    computed.add(layer)
    for place, sample in zip(places, layer_input(args, kwargs), strict=True):
        place.copy_(sample[: len(place)])


def _require_states(path: str, layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    try:
        layer_input(args, kwargs)
    except InputError as error:
        raise InputError(f"target.path={path}: {error}") from None


@torch.no_grad()
def read_logit_transform(target: Target) -> LogitTransform:
    """Return what turns `lm_head` times the final-normed last hidden into the target's own logits, proven on some.

    The teacher is computed from the stored hidden that way; InputError where none that the config names does it, and
    where the layers pass on what no head can draft from."""
    vocab_size = len(target.embedding)
    input_ids = torch.randint(vocab_size, (2, 8), generator=torch.Generator().manual_seed(0)).to(target.device)
    input_ids[1, :4] = input_ids[0, :4]  # the same text, continued differently
    outputs: list[Any] = []
    with ExitStack() as hooks:
        for layer in target.layers:
            require = partial(_require_states, target.path)
            hooks.callback(layer.register_forward_pre_hook(require, with_kwargs=True).remove)
        keep = target.decoder.register_forward_hook(lambda module, args, output: outputs.append(output))
        hooks.callback(keep.remove)
        logits = target.model(input_ids=input_ids, use_cache=False).logits[0]
    hidden = outputs[0].last_hidden_state  # (2, 8, H)
    one, other = hidden[:, :4].float()
    if (one - other).norm() > 0.1 * one.norm():
        raise InputError(
            f"target.path={target.path}: its states at a token change with later tokens, as with bidirectional "
            f"attention to a prompt, and a head drafts from what does not change; choose another target"
        )
    product = nn.functional.linear(hidden[0].to(target.lm_head.device), target.lm_head)
    # One and the same product: the tolerance is for kernels that round differently.
    allowed = max(torch.finfo(target.lm_head.dtype).eps, 1e-5)
    errors = {
        transform: float((logits.to(product.device) - transform(product)).abs().max() / logits.abs().max())
        for transform in logit_transforms(target.text_config)
    }
    best = min(errors, key=errors.__getitem__)
    if errors[best] <= allowed:
        return best
    raise InputError(
        f"target.path={target.path}: its logits are not lm_head times the last hidden, nor a scale or soft-cap of its "
        f"config on top (a bias comes in between, or the model does more), so it cannot be a teacher; choose another "
        f"target"
    )
