"""The search for the chain that is the fastest at each load, for a server that changes its steps with the load.

A server that is started with a chain is timed at all loads. Which chain comes next, most of the loads decide, each by
the rule of search.py. SGLang adapts chains alone.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Protocol

from eagle3.errors import InputError
from eagle3.serving.tune.predict import Gain, Setting, all_settings, assumed_cost, chain_gains
from eagle3.serving.tune.search import SearchState
from eagle3.serving.tune.timing import LoadTiming
from eagle3.settings.serving import TuneSettings

log = logging.getLogger(__name__)
LoadStates = dict[int, SearchState]  # requests at a time → what is known there


class LoadTimer(Protocol):
    """Times one server, of the plain target or with a chain, at each load."""

    def at_loads(self, setting: Setting | None, loads: Sequence[int]) -> dict[int, LoadTiming]: ...


def search_loads(
    settings: TuneSettings,
    gains: Mapping[Setting, Gain] | None,
    timer: LoadTimer,
    keep: Callable[[LoadStates], None],
) -> LoadStates:
    """Search among the chains of `gains`, or where that is None of tune.steps, by what the longest one's server counts.

    `keep` is called after each server."""
    assert settings.loads is not None
    plain = timer.at_loads(None, settings.loads)
    first: dict[int, LoadTiming] = {}
    if gains is None:
        chains = all_settings(steps=settings.steps, topk=[1], draft_tokens=[], draft_vocab_size=1)
        first = timer.at_loads(chains[-1], settings.loads)
    states = {}
    for load, timing in plain.items():
        known = gains or _counted(first[load], chains)
        cost = assumed_cost(timing.seconds_per_token, concurrency=load, **settings.assumed)
        states[load] = SearchState(known, cost, timing, {chains[-1]: first[load]} if first else {})
    keep(states)
    any_load = states[settings.loads[0]]
    while len(any_load.timed) + len(any_load.failed) < settings.timed and (chain := _wanted(states)):
        _time(chain, states, timer)
        keep(states)
    if not any_load.timed:
        raise InputError(f"none of the chains could be timed, the last: {[*any_load.failed.values()][-1]}")
    return states


def adaptive_steps(states: LoadStates) -> dict[int, int]:
    """Return the fastest timed chain's steps for each load, 0 where none is faster than the plain target."""
    best = {load: state.best() for load, state in states.items()}
    return {load: chain.steps if states[load].speed_up(took) > 1 else 0 for load, (chain, took) in best.items()}


def thresholds(steps: Mapping[int, int]) -> dict[int, int]:
    """Return from how many running requests on a chain has how many steps: halfway, by ratio, between measured loads.

    A server with 64 places runs fewer requests whenever some have ended, and shall draft then as at 64, not as at 32.
    """
    loads = sorted(steps)
    found = {loads[0]: steps[loads[0]]}
    for below, load in pairwise(loads):
        if steps[load] != steps[below]:
            found[math.ceil(math.sqrt(below * load))] = steps[load]
    return found


def _counted(longest: LoadTiming, chains: Sequence[Setting]) -> Mapping[Setting, Gain]:
    assert longest.gain is not None
    return chain_gains(longest.per_depth, longest.gain, chains)


def _wanted(states: LoadStates) -> Setting | None:
    """Return the chain that most loads would time next; of several that of the smallest load."""
    votes = Counter(chain for state in states.values() if (chain := state.next_to_time()) is not None)
    return votes.most_common(1)[0][0] if votes else None


def _time(chain: Setting, states: LoadStates, timer: LoadTimer) -> None:
    try:
        timed = timer.at_loads(chain, [*states])
    except InputError as reason:
        log.warning("%s: %s", chain.flags, reason)
        for state in states.values():
            state.note(chain, str(reason))
    else:
        for load, state in states.items():
            state.note(chain, timed[load])
