"""A random target, and a random head that is right about it now and then: what the tests of speculation share.

Shapes: H hidden size, D draft vocabulary, T tokens.
"""

import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from heads import SETTINGS
from stores import ASSETS
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from eagle3.decoding.speculate import plain_greedy
from eagle3.features.sample import Sample, positions_with_teacher
from eagle3.head.draft_head import DraftHead, HeadConfig
from eagle3.target.capture import Capture
from eagle3.target.model import Target

LAYERS = [1, 2, 4]
NEW_TOKENS = 24
NOISE = 0.03
PROMPT = torch.randint(3, 50, (20,), generator=torch.Generator().manual_seed(3)).tolist()
CHAIN = {"steps": 3}
TREE = {"steps": 3, "topk": 3, "draft_tokens": 9}
SMALL = LlamaConfig(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=5,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.5,
    eos_token_id=2,
    pad_token_id=0,
)


def make_target(config):
    config.tie_word_embeddings = False  # else random models repeat what they read
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    return Target(
        path="random",
        revision=None,
        folder=Path(),
        config=config,
        config_dict={},
        checkpoint_dtype=None,
        tokenizer=AutoTokenizer.from_pretrained(ASSETS / "tiny"),
        stop_ids=frozenset({2}),
        trust_remote_code=False,
        model=model,
        decoder=model.model if hasattr(model, "model") else model.get_decoder(),
    )


@cache
def small_target():
    """Random weights in float64: comparing with a reference has no near-ties."""
    target = make_target(SMALL)
    target.model.double()
    return target


def sample_with_features(target, layers, ids, turns, sample_id=""):
    """What precompute.py stores of a conversation, in the dtype of the target."""
    [features] = Capture(target, layers)(ids[None], [len(ids)])
    has_teacher = positions_with_teacher(turns, "answers")
    last = features.last_hidden_state[has_teacher]
    return Sample(
        id=sample_id, input_ids=ids, turns=turns, aux_hidden_states=features.aux_hidden_states, last_hidden_state=last,
        teacher_argmax=(last @ target.lm_head.T).argmax(-1), has_teacher=has_teacher,
    )  # fmt: skip


def stopping_at(target, *tokens):
    """The same target, with more tokens that end a turn."""
    stopping = replace(target)
    stopping.__dict__["stop_ids"] = target.stop_ids | {*tokens}
    return stopping


def fitted_head(target, prompt, steps=3, **changes):
    """A random head whose `lm_head` is fitted, by least squares, to what the target says after this prompt.

    Noise makes it wrong at any depth now and then, with the right token among its best few."""
    ids = prompt + plain_greedy(target, prompt, NEW_TOKENS)
    vocab_size, hidden_size = target.embedding.shape
    draft_ids = torch.tensor(sorted({*ids[len(prompt) :], *range(3, 20)}))
    sizes = {"hidden_size": hidden_size, "intermediate_size": 48, "vocab_size": vocab_size}
    settings = SETTINGS | sizes | {"draft_vocab_size": len(draft_ids), "fc_norm": True}
    torch.manual_seed(1)
    head = DraftHead(HeadConfig(**settings | changes), draft_ids).to(target.embedding.dtype).requires_grad_(False)
    for parameter in head.midlayer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    aux = Capture(target, LAYERS)(torch.tensor([ids]), [len(ids)])[0].aux_hidden_states
    outputs, wanted = [], []
    for row in range(len(prompt) - 1, len(ids) - 2):
        for step in range(min(steps, len(ids) - 2 - row)):
            outputs.append(chain_output(head, target, aux, ids[: row + 2 + step], row))
            wanted.append(ids[row + 2 + step])
    one_hot = (torch.tensor(wanted)[:, None] == draft_ids).to(aux.dtype)
    fitted = torch.linalg.lstsq(head.norm(torch.stack(outputs)), one_hot).solution.T
    head.lm_head.weight.data = 8 * (fitted + NOISE * torch.randn_like(fitted))
    return head


def chain_output(head, target, aux, ids, last_row, window=None):
    """The head's output at the end of `ids` without any cache: rows up to `last_row` on the target's features, the
    later ones on the head's own output, one dense masked attention over all of them, or the last `window`, for each."""
    hidden, count = head.fuse(aux[: last_row + 1]), len(ids) - 1
    while True:
        x = head.attention_input(target.embedding[ids[1 : len(hidden) + 1]], hidden)
        positions = torch.arange(len(hidden))
        key, value = head.keys_values(x, positions)
        key, value = (states.repeat_interleave(2, dim=1) for states in (key, value))  # 2 query heads for each
        scores = torch.einsum("rqc,tqc->qrt", head.queries(x, positions), key) / math.sqrt(key.shape[-1])
        back = positions[:, None] - positions
        unseen = (back < 0) | (back >= (window or math.inf))
        weights = scores.masked_fill(unseen, -torch.inf).softmax(-1)
        output = head.output(hidden, torch.einsum("qrt,tqc->rqc", weights, value))[-1]
        if len(hidden) == count:
            return output
        hidden = torch.cat([hidden, head.feedback(output)[None]])


def reference_paths(head, target, ids, *, steps, topk, draft_tokens, window=None):
    """The tree behind `ids` as a set of leaf paths, every node's probabilities computed from scratch."""
    aux = Capture(target, LAYERS)(torch.tensor([ids[:-1]]), [len(ids) - 1])[0].aux_hidden_states
    scores, frontier = {}, {(): 1.0}
    for _ in range(steps):
        children = {}
        for path, score in frontier.items():
            output = chain_output(head, target, aux, [*ids, *path], len(ids) - 2, window)
            best = head.logits(output).softmax(-1).topk(topk)
            for probability, draft_id in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                children[(*path, int(head.draft_ids[draft_id]))] = score * probability
        scores |= children
        frontier = dict(sorted(children.items(), key=lambda item: -item[1])[:topk])
    tree = set(sorted(scores, key=lambda path: -scores[path])[: draft_tokens - 1])
    return {path for path in tree if not any(other[:-1] == path for other in tree)}
