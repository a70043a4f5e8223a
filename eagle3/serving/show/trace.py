"""Decoded prompts, token by token: the page's content as plain values.

Tokens are in visible form: parts of characters, line ends, control characters, other writing directions.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from eagle3.decoding.speculate import Decoded, Measurement, Round, Speculator
from eagle3.errors import escaped
from eagle3.progress import Bar
from eagle3.serving.check.prompts import PromptSet
from eagle3.settings.serving import Decoding

PART = "\ufffd"  # what a tokenizer decodes bytes to that are no whole character
CONTEXT = 4  # tokens decoded before a piece: some tokenizers drop a space at the start, characters have 4 bytes
MARKS = {"\n": "↵\n", "\r": "␍", "\t": "⇥"}


@dataclass(frozen=True)
class Trace:
    """A prompt, its answer, and the rounds that made it."""

    source: str
    prompt_ids: list[int]
    decoded: Decoded
    rounds: list[Round]


@dataclass(frozen=True)
class Token:
    """A token of the page. `kind`: "accepted" or "rejected" drafts, or the "target" gave it; `probability` is what the
    head gave a draft. One that is `cut` comes after the end of the answer."""

    id: int
    text: str
    kind: str
    round: int = 0
    depth: int = 0
    probability: float | None = None
    cut: bool = False


@dataclass(frozen=True)
class ShownRound:
    """A round's drafts from the top down, each before its continuations, and the target's own token."""

    drafts: list[Token]
    own: Token
    accepted: int


@dataclass(frozen=True)
class Row:
    """A line of the table; `rates` are the accept length and the shares per depth, none where nothing was drafted."""

    name: str
    prompts: int
    tokens: int
    verifications: int
    rates: list[float]


def traced(speculator: Speculator, prompts: PromptSet, decoding: Decoding) -> list[Trace]:
    """Decode the prompts as eagle3/decoding/speculate.py's `measure` does, and keep every round."""
    settings: dict[str, Any] = asdict(decoding)
    first_seed = settings.pop("seed")
    traces = []
    for number, prompt_ids in enumerate(Bar(prompts.prompts, desc="decode", unit="prompt")):
        rounds: list[Round] = []
        decoded = speculator.decode(prompt_ids, seed=first_seed + number, watch=rounds.append, **settings)
        traces.append(Trace(prompts.sources[number], prompt_ids, decoded, rounds))
    return traces


def shown_rounds(tokenizer: Any, trace: Trace) -> Iterator[ShownRound]:
    """Yield the rounds of an answer, each token with the text that it adds to those before it."""
    known, length = trace.prompt_ids + trace.decoded.token_ids[:1], len(trace.prompt_ids + trace.decoded.token_ids)
    for number, each in enumerate(trace.rounds, start=1):
        tree, accepted = each.drafts, each.accepted
        paths, drafts = tree.paths(), []
        for node in _from_the_top(each):
            *before, token = paths[node]
            kind, cut = "accepted" if node in accepted else "rejected", len(known + before) >= length
            text = visible(piece(tokenizer, known + before, token))
            drafts.append(Token(token, text, kind, number, len(before) + 1, tree.probability(node), cut))
        *before, token = each.chosen
        text, cut = visible(piece(tokenizer, known + before, token)), len(known + before) >= length
        yield ShownRound(drafts, Token(token, text, "target", number, len(before) + 1, None, cut), len(accepted))
        known = known + each.chosen


def _from_the_top(each: Round) -> Iterator[int]:
    """Go through the tree depth first, the likelier of siblings first."""
    tree = each.drafts
    waiting = [-1]
    while waiting:
        node = waiting.pop()
        if node != -1:
            yield node
        below = [child for child, parent in enumerate(tree.parents) if parent == node]
        waiting += sorted(below, key=lambda child: tree.scores[child])


def shown_answer(tokenizer: Any, trace: Trace, rounds: list[ShownRound]) -> list[Token]:
    """Return the answer's tokens; before each that the target gave against the drafts, the likeliest draft there."""
    first = trace.decoded.token_ids[0]
    tokens = [Token(first, visible(piece(tokenizer, trace.prompt_ids, first)), "target")]
    for each in rounds:
        tokens += [token for token in each.drafts if token.kind == "accepted"]
        tokens += [*_instead(each), each.own]
    return [token for token in tokens if not token.cut]


def _instead(each: ShownRound) -> list[Token]:
    """Return the likeliest draft at the place of the target's own token."""
    last = max((place for place, token in enumerate(each.drafts) if token.kind == "accepted"), default=-1)
    for token in each.drafts[last + 1 :]:
        if token.depth <= each.accepted:
            break  # no longer a continuation of the accepted ones
        if token.depth == each.own.depth:
            return [token]
    return []


def rows(traces: list[Trace]) -> list[Row]:
    """Return the lines of the table: each source, the largest first, then all together."""
    by_source: dict[str, list[Trace]] = {}
    for trace in traces:
        by_source.setdefault(trace.source, []).append(trace)
    groups = sorted(by_source.items(), key=lambda item: -len(item[1]))
    return [_row(source, group) for source, group in groups] + [_row("all", traces)]


def _row(name: str, traces: list[Trace]) -> Row:
    measured = Measurement([trace.decoded for trace in traces], None, 0.0)
    rates = [measured.accept_length, *measured.per_depth] if measured.verifications else []
    return Row(name, len(traces), measured.tokens, measured.verifications, rates)


# --- tokens in visible form ------------------------------------------------------------------------------------------


def piece(tokenizer: Any, before: list[int], token_id: int) -> str:
    """Return the text that a token adds to `before`, or its name if it adds no whole character."""
    known = tokenizer.decode(before[-CONTEXT:])
    text = tokenizer.decode([*before[-CONTEXT:], token_id])
    if not text.startswith(known):  # the token makes the bytes before it a character
        known = known.rstrip(PART)
    added = text[len(known) :] if text.startswith(known) else tokenizer.decode([token_id])
    if added and PART not in added:
        return added
    return str(tokenizer.convert_ids_to_tokens(token_id) or f"<{token_id}>")


def visible(text: str) -> str:
    """Mark line ends and tabs; write all else that does not print as an escape."""
    return "".join(MARKS.get(character) or escaped(character) for character in text)
