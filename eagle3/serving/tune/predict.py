"""What a draft setting will be worth: tokens and time of a verification, with the drafting before it.

time per token = time of a verification / tokens of a verification
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

from eagle3.decoding.paired import Gains, accept_length
from eagle3.decoding.replay import Recording, Rounds
from eagle3.errors import InputError

TIMING_ERROR = 0.02  # share by which the same load on the same server may differ from time to time


class Setting(NamedTuple):
    """How the head drafts, as SGLang's three flags. `draft_tokens` counts the root; a chain (topk 1) has steps + 1."""

    steps: int
    topk: int
    draft_tokens: int

    @property
    def flags(self) -> str:
        return (
            f"--speculative-num-steps {self.steps} --speculative-eagle-topk {self.topk} "
            f"--speculative-num-draft-tokens {self.draft_tokens}"
        )


def all_settings(
    *, steps: Sequence[int], topk: Sequence[int], draft_tokens: Sequence[int], draft_vocab_size: int
) -> list[Setting]:
    """Return chains of `steps`, and the trees of these sizes that can hold a path of `steps` and can be filled."""
    if max(topk) > draft_vocab_size:
        raise InputError(f"tune.topk={[*topk]}: the head can draft no more than its {draft_vocab_size} tokens")
    found = {
        Setting(depth, width, tokens)
        for depth in steps
        for width in topk
        for tokens in ([depth + 1] if width == 1 else draft_tokens)
        if depth < tokens <= 1 + width + (depth - 1) * width**2
    }
    if not found:
        raise InputError(
            f"tune.steps={[*steps]} tune.topk={[*topk]} tune.draft_tokens={[*draft_tokens]} holds no tree: it has from "
            f"steps + 1 to 1 + topk + (steps - 1)·topk² draft_tokens"
        )
    return sorted(found)


# --- tokens of a verification ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gain:
    """What a verification gains: `accept_length` as SGLang counts it, and the `tokens` that reach the answer.

    The last verification of an answer may accept more than there is room for. `standard_error`, of the accept length,
    is over prompts."""

    accept_length: float
    tokens: float
    standard_error: float | None = None


def replayed_gains(recording: Recording, settings: Iterable[Setting]) -> dict[Setting, Gain]:
    """Return what our decoder would measure with each setting, exactly as far as numbers are (see replay.py)."""
    gains = {}
    for setting in settings:
        answers = [answer for answer in recording.replay_each(**setting._asdict()) if answer.verifications]
        if not answers:
            raise InputError(
                "prompts.path: no answer was longer than one token, so no draft was verified; take other prompts "
                "or raise max_new_tokens"
            )
        replayed = Rounds.of_all(answers)
        accepted, verifications = zip(*((sum(each.gained), each.verifications) for each in answers), strict=True)
        length = accept_length(Gains(np.array(accepted, float), np.array(verifications, float)))
        gains[setting] = Gain(length.value, replayed.tokens / replayed.verifications, length.standard_error)
    return gains


def chain_gains(per_depth: Sequence[float], longest: Gain, chains: Sequence[Setting]) -> dict[Setting, Gain]:
    """Return what each chain gains, from a server that ran the last of them, the `longest`: `per_depth` are the shares
    of its verifications that accepted at least 1, 2, … drafts.

    A shorter chain needs several verifications for what one of these gave: k accepted drafts and the target's own token
    are ⌈(k + 1) / (steps + 1)⌉ of them, and where the longest chain was right to its end, so that the next one goes on
    from there, the plain quotient. That a draft is right more often when fewer come before it is left out."""
    most = chains[-1].steps
    at_least = [1.0, *per_depth, *[0.0] * (most + 1 - len(per_depth))]
    exactly = [at_least[k] - at_least[k + 1] for k in range(most + 1)]
    gains = {}
    for chain in chains:
        needed = [math.ceil((k + 1) / (chain.steps + 1)) for k in range(most)] + [(most + 1) / (chain.steps + 1)]
        verifications = sum(share * count for share, count in zip(exactly, needed, strict=True))
        gains[chain] = Gain(longest.accept_length / verifications, longest.tokens / verifications)
    return gains


# --- time of a verification ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class VerificationCost:
    """Seconds of a verification, whatever its size; for each token that it verifies; for each draft step before it."""

    fixed: float
    draft_token: float
    step: float

    def seconds(self, setting: Setting) -> float:
        return self.fixed + self.draft_token * setting.draft_tokens + self.step * setting.steps


def assumed_cost(
    plain_seconds: float, *, concurrency: int, compute_bound_tokens: float, step: float
) -> VerificationCost:
    """Return what is assumed before anything is timed. A forward reads the weights once and computes for each token of
    all requests; at `compute_bound_tokens` both take the same time. `step` is in forwards of the plain target."""
    computing = concurrency / (compute_bound_tokens + concurrency)
    return VerificationCost(plain_seconds * (1 - computing), plain_seconds * computing, plain_seconds * step)


@dataclass(frozen=True)
class FittedCost:
    """The cost of a verification and, from the `covariance` of its three numbers, how far it is known."""

    cost: VerificationCost
    covariance: np.ndarray

    def standard_deviation(self, setting: Setting) -> float:
        """Return how far a verification's seconds are uncertain."""
        terms = _terms(setting)
        return float(np.sqrt(terms @ self.covariance @ terms))


def fitted_cost(seconds: Mapping[Setting, float], assumed: VerificationCost) -> FittedCost:
    """Fit the cost to timed verifications [s]: Bayesian linear regression, without numbers below 0.

    Timings are taken to be off by TIMING_ERROR of their value, each assumed number by all of its own."""
    scale = np.array([assumed.fixed, assumed.draft_token, assumed.step])
    timed = [_terms(setting) * scale / (TIMING_ERROR * measured) for setting, measured in seconds.items()]
    system = np.vstack([*timed, np.eye(3)])
    wanted = np.concatenate([np.full(len(timed), 1 / TIMING_ERROR), np.ones(3)])
    covariance = np.linalg.inv(system.T @ system) * np.outer(scale, scale)
    return FittedCost(VerificationCost(*(nnls(system, wanted)[0] * scale).tolist()), covariance)


def _terms(setting: Setting) -> np.ndarray:
    return np.array([1.0, setting.draft_tokens, setting.steps])
