"""Whether the turns of a row are one conversation, first turn first, by the times and the parents that they name."""

from datetime import UTC, datetime
from itertools import chain, pairwise
from typing import Any

from eagle3.prompts.reading.prompt import Refused
from eagle3.prompts.reading.tools import Turn

ORDERS = ("timestamp", "created_at", "createdAt", "create_time", "ts", "turn_index", "index", "order")
PARENTS = ("parent_id", "parentId", "parent_message_id", "parentMessageId", "parent_message_uuid")
WITH_TURNS = ("children", "replies")
IDS = ("id", "message_id", "messageId", "uuid")


def require_in_order(turns: list[Turn]) -> None:
    """Raise Refused for turns in another order than they say, for trees, and for edited turns side by side."""
    keys = set().union(*(turn for _, turn in turns))
    for name in filter(keys.__contains__, ORDERS):  # of questions only: the clocks of a server and a browser differ
        places = [_number(turn.get(name)) for role, turn in turns if role == "user"]
        if any(a is not None and b is not None and b < a for a, b in pairwise(places)):
            raise Refused("turns in another order than a key of theirs says", name=name)
    for name in filter(keys.__contains__, WITH_TURNS):
        inside = [turn[name] for _, turn in turns if isinstance(turn.get(name), list)]
        if any(isinstance(each, dict) for each in chain.from_iterable(inside)):
            raise Refused("turns inside a turn", name=name)
    for name in filter(keys.__contains__, PARENTS):
        if not any(turn.get(name) is not None for _, turn in turns):
            continue
        for (_, before), (_, turn) in pairwise(turns):
            own = next((before[key] for key in IDS if before.get(key) is not None), None)
            if own is not None and name in turn and turn[name] != own:
                raise Refused("turns of several branches of a conversation", name=name)


def _number(value: Any) -> float | None:
    """Return a number or a time, which may be text, as a number."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            pass
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            return None
    if isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
    return value if isinstance(value, int | float) else None
