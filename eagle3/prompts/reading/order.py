"""Whether the turns of a row are one conversation, first turn first, by the ids, times and parents that they name."""

from datetime import UTC, datetime
from itertools import chain, pairwise
from typing import Any

from eagle3.prompts.reading.prompt import Refused
from eagle3.prompts.reading.shapes import TURN_NUMBERS, TURN_OF, plain_name
from eagle3.prompts.reading.tools import Turn

# Keys of turns, as `plain_name` returns them.
ORDERS = TURN_NUMBERS | {
    "timestamp", "timestampms", "createdat", "createtime", "created", "createddatetime", "sentat", "date", "datetime",
    "ts", "index", "order",
}  # fmt: skip
PARENTS = frozenset(("parent", "parentid", "parentuuid", "parentmessageid", "parentmessageuuid", "ancestors"))
WITH_TURNS = frozenset(("children", "childrenids", "replies"))
IDS = frozenset(("id", "messageid", "uuid"))
READ = TURN_OF | ORDERS | PARENTS | WITH_TURNS
BRANCHES = "turns of several branches of a conversation"


def require_in_order(turns: list[Turn]) -> None:
    """Raise Refused for turns of several conversations, turns in another order than they say, trees, and edited turns
    side by side."""
    keys = {name: plain_name(str(name)) for _, turn in turns for name in turn}
    if READ.isdisjoint(keys.values()):
        return
    for name in [name for name, plain in keys.items() if plain in TURN_OF]:
        if len({str(turn[name]) for _, turn in turns if turn.get(name) is not None}) > 1:
            raise Refused("turns of several conversations", name=name)
    # Of questions only: the clocks of a server and a browser differ.
    for name in [name for name, plain in keys.items() if plain in ORDERS]:
        places = [_number(turn.get(name)) for role, turn in turns if role == "user"]
        if any(a is not None and b is not None and b < a for a, b in pairwise(places)):
            raise Refused("turns in another order than a key of theirs says", name=name)
    for name in [name for name, plain in keys.items() if plain in WITH_TURNS]:
        inside = [turn[name] for _, turn in turns if isinstance(turn.get(name), list)]
        if any(isinstance(each, dict) for each in chain.from_iterable(inside)):
            raise Refused("turns inside a turn", name=name)
        if any(len(each) > 1 for each in inside):
            raise Refused(BRANCHES, name=name)
    for name in [name for name, plain in keys.items() if plain in PARENTS]:
        if not any(_parent(turn.get(name)) is not None for _, turn in turns):
            continue
        for (_, before), (_, turn) in pairwise(turns):
            own = [before[key] for key in before if keys[key] in IDS and before[key] is not None]
            if own and name in turn and _parent(turn[name]) not in own:
                raise Refused(BRANCHES, name=name)


def find_parent_id(turn: dict) -> Any:
    """Return the id of a turn's parent."""
    return next((_parent(value) for key, value in turn.items() if plain_name(key) in PARENTS), None)


def _parent(value: Any) -> Any:
    """Return a turn's parent, of a list of all before it the last one."""
    return (value or [None])[-1] if isinstance(value, list) else value


def _number(value: Any) -> float | None:
    """Return a number or a time, which may be text or an object around one, as MongoDB exports it, as a number."""
    if isinstance(value, dict) and len(value) == 1:
        return _number(*value.values())
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
