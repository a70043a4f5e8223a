"""Lossless speculative decoding, chain or tree, on any causal language model.

In each round the head drafts a tree of tokens after the last verified one, the target reads all of it in one forward,
and the walk from the root keeps the tokens that the target would have generated, plus one token of the target's own.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from eagle3.answers.generate import cut
from eagle3.decoding.drafter import Tree, draft_tree
from eagle3.decoding.verifier import Sampling, verifier
from eagle3.draft_shape import checked_draft_shape
from eagle3.errors import InputError
from eagle3.head.head import Head
from eagle3.head.registry import kind_named
from eagle3.head_files.computed import doubtful
from eagle3.head_files.files import HeadFiles
from eagle3.head_files.finding import TargetFacts
from eagle3.head_files.format import draft_head
from eagle3.progress import Bar
from eagle3.target.capture import check_capture_layers
from eagle3.target.model import Target

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Decoded:
    """One answer. `token_ids` includes the stop token if `finish_reason` is "stop"; otherwise it was cut ("length").

    `accepted[d - 1]` counts the verifications that accepted at least d drafts. As in SGLang, the last round counts
    fully, with drafts past `max_new_tokens` or past a stop token, which the answer drops. `behind_stop` counts the
    tokens dropped past a stop token: accepted drafts and the target's next token. Prefill's token needs no verification
    and is not counted.
    """

    token_ids: list[int]
    verifications: int
    accepted: list[int]
    behind_stop: int
    finish_reason: str


@dataclass(frozen=True)
class Round:
    """One verification: the `drafts`, and the tokens that the target `chose`: the accepted drafts, then one of its own.
    In the last round, tokens may be past the end of the answer."""

    drafts: Tree
    chosen: list[int]

    @property
    def accepted(self) -> list[int]:
        """Return the accepted drafts, as indices in the tree."""
        return self.drafts.walk(self.chosen[:-1])


@dataclass(frozen=True)
class Measurement:
    """Decoded answers of many prompts; `lossless` is the share equal to the target's greedy answers (None: sampled, or
    not compared)."""

    decoded: list[Decoded]
    lossless: float | None
    seconds: float

    @property
    def accept_length(self) -> float:
        """1 + accepted drafts / verifications, as SGLang counts them over all requests."""
        return 1 + sum(self.per_depth)

    @property
    def accept_length_kept(self) -> float:
        """The same without tokens past a stop token: a drafted stop token then counts as its round's own token and not
        as an accepted draft."""
        dropped = sum(answer.behind_stop for answer in self.decoded)
        return self.accept_length - dropped / self.verifications

    @property
    def per_depth(self) -> list[float]:
        """Return the share of verifications that accepted at least 1, 2, … `steps` drafts."""
        if not self.verifications:
            raise nothing_verified(len(self.decoded))
        depths = zip(*(answer.accepted for answer in self.decoded), strict=True)
        return [sum(depth) / self.verifications for depth in depths]

    @property
    def verifications(self) -> int:
        return sum(answer.verifications for answer in self.decoded)

    @property
    def tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.decoded)


class Speculator:
    """A target and a head that drafts for it; the head is moved to the target's device and keeps its own dtype."""

    def __init__(self, target: Target, head: Head, capture_layers: Sequence[int]) -> None:
        """`capture_layers` are indices into Hugging Face's `hidden_states`."""
        self.target = target
        self.head = head.to(target.device)
        self.capture_layers = check_capture_layers(capture_layers, len(target.layers))
        vocab_size, hidden_size = target.embedding.shape
        if head.config.hidden_size != hidden_size or int(head.draft_ids.max()) >= vocab_size:
            raise InputError(
                f"target.path={target.path} has hidden size {hidden_size} and {vocab_size} tokens; the head is for "
                f"{head.config.hidden_size} and {head.config.vocab_size}: give the target that the head was trained on"
            )

    @torch.inference_mode()
    def decode(
        self,
        prompt_ids: list[int],
        *,
        steps: int,
        topk: int = 1,
        draft_tokens: int | None = None,
        draft_window: int | None = None,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int = 0,
        watch: Callable[[Round], None] | None = None,
    ) -> Decoded:
        """Answer one prompt. `draft_tokens` counts the root, as SGLang's flag does; a chain has steps + 1. The
        head attends to the last `draft_window` keys (None: all). `watch` is called with every round.

        At temperature 0 the tokens are the target's greedy ones, otherwise its samples for this seed, from the `top_k`
        most probable tokens (0: all) and of those the fewest that hold `top_p`. They do not depend on the drafts (up to
        rounding, which depends on how many tokens a forward reads)."""
        num_drafts = checked_draft_shape(steps, topk, draft_tokens).draft_tokens - 1
        require_topk(topk, self.head.config.draft_vocab_size)
        kind = kind_named(self.head.kind)
        kind.require_steps(self.head.config, steps)
        room = len(prompt_ids) + max_new_tokens + steps
        cached = kind.drafting(self.head, self.target.embedding, room, window=draft_window)
        accepted, verifications, behind_stop = [0] * steps, 0, 0
        sampling: Sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
        with verifier(self.target, self.capture_layers, seed=seed, **sampling) as reader:
            fresh = reader.advance(prompt_ids, [[]])
            answer, finish_reason = cut(fresh, self.target.stop_ids, max_new_tokens)
            next_tokens = prompt_ids[1:] + fresh  # head row t takes the feature of x_t and the embedding of x_{t+1}
            while not finish_reason:
                hidden = cached.confirm(reader.features(), next_tokens)  # its last row predicts the first draft
                tree = draft_tree(self.head, cached, hidden, steps=steps, topk=topk, num_drafts=num_drafts)
                next_tokens = reader.advance(answer[-1:], tree.branches())
                verifications += 1
                if watch is not None:
                    watch(Round(tree, next_tokens))
                for depth in range(len(next_tokens) - 1):
                    accepted[depth] += 1
                made = answer + next_tokens
                answer, finish_reason = cut(made, self.target.stop_ids, max_new_tokens)
                behind_stop = len(made) - len(answer) if finish_reason == "stop" else 0
        return Decoded(answer, verifications, accepted, behind_stop, finish_reason)


def load_speculator(target: Target, files: HeadFiles) -> Speculator:
    """Build the head of these files in the dtype that the target was loaded in; warn of what it may not compute."""
    speculator = Speculator(target, draft_head(files, target.embedding.dtype), files.served_layers(len(target.layers)))
    warn_of_doubts(target, files)
    return speculator


def warn_of_doubts(target: Target, files: HeadFiles) -> None:
    """Warn of what the trainer of a head computed, or may have computed, and decoding does not."""
    facts = TargetFacts(config=target.facts, dtype=None, identity=None, embedding=target.embedding)
    for message in doubtful(files, facts):
        log.warning(
            "head=%s is decoded by SGLang's rules, but may have been trained by others: %s", files.path, message
        )


@torch.inference_mode()
def plain_greedy(target: Target, prompt_ids: list[int], max_new_tokens: int) -> list[int]:
    """Return the target's greedy answer, decoded token by token over the same kind of cache."""
    answer: list[int] = []
    known, finish_reason = prompt_ids, ""
    with verifier(target, [], seed=0, temperature=0.0, top_p=1.0, top_k=0) as reader:
        while not finish_reason:
            known = reader.advance(known, [[]])
            answer, finish_reason = cut(answer + known, target.stop_ids, max_new_tokens)
    return answer


def measure(
    target: Target,
    head: Head,
    capture_layers: Sequence[int],
    prompts: Sequence[list[int]],
    *,
    seed: int,
    progress: str | None,
    lossless: bool = True,
    plain: Sequence[list[int]] | None = None,
    **settings: Any,
) -> Measurement:
    """Decode every prompt, seeded by its index; `progress` names the bar (None: no bar).

    `lossless` compares greedy answers with the target's, which takes longer than speculative decoding; `plain` are
    these, if the caller has them already. `settings` are those of `Speculator.decode`.
    `seconds` is the time of speculative decoding only."""
    speculator, greedy = Speculator(target, head, capture_layers), lossless and settings["temperature"] == 0
    decoded, equal, seconds = [], 0, 0.0
    for number, prompt_ids in enumerate(Bar(prompts, desc=progress, unit="prompt", disable=progress is None)):
        start = time.perf_counter()
        answer = speculator.decode(prompt_ids, seed=seed + number, **settings)
        seconds += time.perf_counter() - start
        decoded.append(answer)
        if greedy:
            own = plain[number] if plain is not None else plain_greedy(target, prompt_ids, settings["max_new_tokens"])
            equal += answer.token_ids == own
    return Measurement(decoded, equal / len(decoded) if decoded and greedy else None, seconds)


def nothing_verified(answers: int) -> InputError:
    """Return the error for answers that all are the one token that prefill gives."""
    return InputError(
        f"prompts.path: none of {answers} answers was longer than one token, so no draft was verified; take other "
        f"prompts or raise max_new_tokens"
    )


def require_topk(topk: int, draft_vocab_size: int, *, setting: str = "topk", head: str = "the head") -> None:
    if topk > draft_vocab_size:
        raise InputError(f"{setting}={topk}: {head} can draft no more than its {draft_vocab_size} tokens; lower topk")
