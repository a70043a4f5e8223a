"""Checks an engine's features on known texts before it captures any others: a wrong layer, order or row stops the run.

There are two references. One is Hugging Face's forward of the same text, where the target fits on this machine: each
captured layer must be nearer to its own states than to those of the neighbouring layers. The other is always the engine
itself: the captured last hidden state times the target's lm_head must give the log-probabilities that the engine
reports for the text's own tokens.

Shapes: T tokens of a text, A captured layers, H hidden size, AH = A · H, V target vocabulary.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from eagle3.engine.capture import Captured
from eagle3.errors import InputError
from eagle3.target.facts import LogitTransform, logit_transforms
from eagle3.target.model import Target
from eagle3.target.sanity_check import TEXT
from eagle3.target.stored import StoredTarget

log = logging.getLogger(__name__)

CODE = (
    "def area(width: float, height: float) -> float:\n    return width * height  # 3.5 x 2 = 7\n\nprint(area(3.5, 2))\n"
)
TEXTS = (TEXT, CODE, f"{CODE}{TEXT}")
# Medians over rows. Precisions and kernels differ by 0.5 to 3 % (bf16), a wrong layer by its own share of the stream.
MOST_DIFFERENCE = 0.25
MOST_NATS = 0.25
LEAST_AGREEMENT = 0.8

Ask = Callable[[list[int], list[tuple[int, int]], dict[str, Any]], "Future[tuple[Captured, dict[str, Any]]]"]


@dataclass(frozen=True)
class Sentinel:
    """A text, and where Hugging Face could compute them: its `hidden_states` around the captured layers, by index, and
    its final-normed last hidden state."""

    input_ids: list[int]
    states: dict[int, Float[Tensor, "T H"]] | None = None
    last: Float[Tensor, "T H"] | None = None


def plain_sentinels(target: StoredTarget) -> list[Sentinel]:
    return [Sentinel(list(target.tokenizer(text).input_ids)) for text in TEXTS]


@torch.inference_mode()
def computed_sentinels(target: Target, layers: Sequence[int]) -> list[Sentinel]:
    near = sorted({layer + step for layer in layers for step in (-1, 0, 1)})
    sentinels = []
    for text in TEXTS:
        ids = list(target.tokenizer(text).input_ids)
        output = target.decoder(
            input_ids=torch.tensor([ids], device=target.device), use_cache=False, output_hidden_states=True
        )
        states = {layer: output.hidden_states[layer][0].float().cpu() for layer in near}
        sentinels.append(Sentinel(ids, states, output.last_hidden_state[0].float().cpu()))
    return sentinels


def check_against_engine(
    ask: Ask, sentinels: Sequence[Sentinel], target: StoredTarget, layers: Sequence[int]
) -> LogitTransform:
    """Raise InputError unless the engine's features match the sentinels'; return what the engine does to its logits."""
    options = {"return_logprob": True, "logprob_start_len": 0}
    asked = [ask(each.input_ids, [(0, len(each.input_ids))], options) for each in sentinels]
    found = [each.result() for each in asked]
    transform = _find_logit_transform(found, sentinels, target)
    differences = [
        _difference(captured, sentinel, layers, target.path)
        for (captured, _), sentinel in zip(found, sentinels, strict=True)
        if sentinel.states is not None
    ]
    if differences:
        log.info("features: hidden states of %d texts differ from Hugging Face's by %.2f %% (median of the worst)",
                 len(differences), 100 * max(differences))  # fmt: skip
    return transform


def _find_logit_transform(
    found: list[tuple[Captured, dict[str, Any]]], sentinels: Sequence[Sentinel], target: StoredTarget
) -> LogitTransform:
    head = target.lm_head.float()
    nats = dict.fromkeys(logit_transforms(target.text_config), 0.0)
    agreement = []
    for (captured, meta), sentinel in zip(found, sentinels, strict=True):
        ids, stated = torch.tensor(sentinel.input_ids[1:]), meta["input_token_logprobs"][1:]
        if [token for _, token, *_ in stated] != ids.tolist():
            raise InputError(
                "features.engine: the engine reports log-probabilities of other tokens; take features=huggingface"
            )
        product = captured.last_hidden_state.float() @ head.T  # (T, V)
        agreement.append(float((product.argmax(-1) == captured.teacher_argmax).float().mean()))
        for transform in nats:
            own = transform(product)[:-1].log_softmax(-1).gather(1, ids[:, None])[:, 0]
            theirs = torch.tensor([logprob for logprob, *_ in stated])
            nats[transform] += float((own - theirs).abs().median()) / len(found)
    best = min(nats, key=nats.__getitem__)
    log.info(
        "features: the engine's own log-probabilities are those of the captured states within %.3f nats; %.1f %% of "
        "teachers agree", nats[best], 100 * min(agreement),
    )  # fmt: skip
    if nats[best] > MOST_NATS or min(agreement) < LEAST_AGREEMENT:
        raise InputError(
            f"features.engine: what was captured of target.path={target.path} does not give the engine's own logits "
            f"({nats[best]:.2f} nats apart, {min(agreement):.0%} of the best tokens agree): rows are missing or in "
            f"another order, or its logits are no lm_head product; take features=huggingface"
        )
    return best


def _difference(captured: Captured, sentinel: Sentinel, layers: Sequence[int], path: str) -> float:
    assert sentinel.states is not None and sentinel.last is not None
    aux = captured.aux_hidden_states.float().chunk(len(layers), dim=-1)
    worst = _relative(captured.last_hidden_state.float(), sentinel.last)
    for layer, states in zip(layers, aux, strict=True):
        near = {other: _relative(states, sentinel.states[other]) for other in (layer - 1, layer, layer + 1)}
        if near[layer] > min(near.values()):
            nearest = min(near, key=near.__getitem__)
            raise InputError(
                f"features.engine: what SGLang captured for layer {layer} of target.path={path} is nearer to "
                f"Hugging Face's layer {nearest} ({near[nearest]:.1%} apart, its own {near[layer]:.1%}); take "
                f"features=huggingface"
            )
        worst = max(worst, near[layer])
    if worst > MOST_DIFFERENCE:
        raise InputError(
            f"features.engine: hidden states that SGLang captured of target.path={path} are {worst:.0%} apart from "
            f"Hugging Face's: another quantisation, revision or model; take features=huggingface"
        )
    return worst


def _relative(ours: Float[Tensor, "T H"], theirs: Float[Tensor, "T H"]) -> float:
    return float(((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).median())
