"""Turns in other forms than a list of objects with a role and a content → such a list."""

from typing import Any

from eagle3.prompts.reading.order import PARENTS, find_parent_id
from eagle3.prompts.reading.prompt import Refused
from eagle3.prompts.reading.shapes import OF_TURNS, Columns, Layout, json_in, plain_name

OF_A_PAIR = ("system", "user", "assistant")
CALL, RESULT = "tool_use", "tool_result"  # types of Anthropic's parts
CURRENT = frozenset(("currentnode", "currentid"))  # columns that name a tree's last turn
DEEPEST = 4  # objects in each other that are searched for turns
HIDDEN = "is_visually_hidden_from_conversation"  # of ChatGPT's turns that nobody wrote, such as custom instructions


def as_turns(value: Any, shape: Layout) -> Any:
    """Return the turns of a list, or of an object of lists, one a key, as `datasets` stores a Sequence; any other value
    as it is."""
    if isinstance(value, dict):
        value = _of_lists(value, shape)
    if not isinstance(value, list):
        return value
    return [turn for each in value for turn in (_split(each, shape) if isinstance(each, dict) else [each])]


def require_nowhere_else(row: dict, shape: Layout, path: tuple[str, ...] = ()) -> None:
    """Raise Refused for turns in another column or inside objects, as in logs of requests; both may be JSON text."""
    for name, value in row.items():
        value = json_in(value)
        if _begins_with_a_turn(value, shape):
            raise Refused("turns in another column", name=".".join((*path, name)))
        if isinstance(value, dict) and len(path) < DEEPEST and not shape.is_turns([value]):
            require_nowhere_else(value, shape, (*path, name))


def _begins_with_a_turn(value: Any, shape: Layout) -> bool:
    """Tell whether a value is a list of turns, by the first: others may have no content, such as calls of tools."""
    if isinstance(value, dict):
        value = _of_lists(value, shape)
    first = value[0] if isinstance(value, list) and value else None
    if not isinstance(first, dict) or shape.is_turns([first]):
        return isinstance(first, dict)
    inside = _wrapped(first, shape)
    return inside is not None and shape.role_in(inside) != "assistant"  # such as `choices`


def _of_lists(value: dict, shape: Layout) -> Any:
    if not all(isinstance(each, list) for each in value.values()):
        return value
    if any(shape.of_turn(value, kind) is None for kind in OF_TURNS) or len({*map(len, value.values())}) > 1:
        return value
    return [dict(zip(value, each, strict=True)) for each in zip(*value.values(), strict=True)]


def _split(turn: dict, shape: Layout) -> list[dict]:
    """Return the turns that an object stands for, most often itself."""
    if shape.of_turn(turn, "role") is None and not shape.is_turns([turn]):
        if (inside := _wrapped(turn, shape)) is None:
            return _of_pair(turn, shape) or [turn]
        turn = inside
    return _of_blocks(turn, shape) if isinstance(turn.get("content"), list) else [turn]


def _wrapped(turn: dict, shape: Layout) -> dict | None:
    """Return the turn inside an object, with what is next to it, or the object with the role that is inside it.

    {"message": {"role", "content"}}, LangChain's {"data": {"type", "content"}}, {"author": {"role"}, "content"}; None
    for any other.
    """
    content = shape.of_turn(turn, "content")
    parts = {key: part for key, part in turn.items() if isinstance(part, dict)}
    found = [key for key, part in parts.items() if shape.role_in(part) is not None or shape.is_turns([part])]
    others = [part for key, part in parts.items() if key not in found and part is not content]
    if len(found) != 1 or any(shape.of_turn(part, "content") is not None for part in others):
        return None  # several turns
    key, part = found[0], parts[found[0]]
    if content is None or content is part:
        return {**{name: value for name, value in turn.items() if name != key}, **part}
    if shape.of_turn(part, "content") is not None:  # a turn that it quotes
        return None
    return {**turn, shape.fields["role"][0]: shape.of_turn(part, "role")}


def _of_pair(turn: dict, shape: Layout) -> list[dict] | None:
    """Return the turns of an object with a question and its answer: Firefly's {"human", "assistant"}, XTuner's
    {"system", "input", "output"}; None if it is none.
    """
    if shape.of_turn(turn, "content") is not None:
        return None
    found = {role: text for key, text in turn.items() if (role := shape.role_named(key)) and text is not None}
    if not (is_by_role := found.keys() >= {"user", "assistant"}):
        columns = shape.read(turn)
        if columns.context()[1] is not None:
            return None
        kinds = {"system": "system", "user": "prompt", "assistant": "answer"}
        found = {role: text for role, kind in kinds.items() if (text := columns.first(kind)) is not None}
    if not {"user", "assistant"} <= found.keys() <= {*OF_A_PAIR} or not all(isinstance(t, str) for t in found.values()):
        return None
    others = {key: value for key, value in turn.items() if value not in found.values()}
    if is_by_role and any(isinstance(value, str) for value in others.values()):  # names of two people and a text
        return None
    return [
        {**(others if role == "user" else {}), **shape.turn(role, found[role])} for role in OF_A_PAIR if role in found
    ]


def _of_blocks(turn: dict, shape: Layout) -> list[dict]:
    """Return a turn with Anthropic's calls and results of tools as OpenAI has them: results are turns of their own."""
    blocks: dict[str, list] = {CALL: [], RESULT: [], "": []}
    for part in turn["content"]:
        kind = part.get("type") if isinstance(part, dict) else None
        blocks[kind if kind in (CALL, RESULT) else ""].append(part)
    if not blocks[CALL] and not blocks[RESULT]:
        return [turn]
    results = [
        {**shape.turn("tool", part.get("content", "")), "tool_call_id": part.get("tool_use_id")}
        for part in blocks[RESULT]
    ]
    turn = {**turn, "content": blocks[""] or None, **({"tool_calls": blocks[CALL]} if blocks[CALL] else {})}
    return [*results, *([turn] if blocks[""] or blocks[CALL] else [])]


# --- trees ---


def find_branch(columns: Columns) -> list[dict] | None:
    """Return the turns up to the current one of an object of turns by their ids, each with its parent, as ChatGPT
    exports conversations; None if no column has one. Without a current one, the tree must have a single branch.
    """
    for column, nodes in columns.row.items():
        if not (isinstance(nodes, dict) and nodes and all(map(_is_node, nodes.values()))):
            continue
        parents = {id: find_parent_id(node) for id, node in nodes.items()}
        named = [value for key, value in columns.row.items() if plain_name(key) in CURRENT and isinstance(value, str)]
        ends = [id for id in named if id in nodes] or [id for id in nodes if id not in parents.values()]
        path: list[dict] = []
        end = ends[0] if len(ends) == 1 else None
        while end is not None and end in nodes and len(path) < len(nodes):
            path.append(nodes[end])
            end = parents[end]
        if not path or end is not None:
            raise Refused("turns as a tree", name=column)
        columns.found = {**columns.found, "messages": [(column, nodes)]}
        return [turn for node in reversed(path) for turn in _of_node(node, columns)]
    return None


def _is_node(value: Any) -> bool:
    return isinstance(value, dict) and not PARENTS.isdisjoint(map(plain_name, value))


def _of_node(node: dict, columns: Columns) -> list[dict]:
    turn = node.get("message", node)
    if not isinstance(turn, dict):  # the root has none
        return []
    about = turn["metadata"] if isinstance(turn.get("metadata"), dict) else {}
    turns = _split(turn, columns.shape)
    if about.get(HIDDEN) and columns.shape.role_in(turns[0]) in OF_A_PAIR:
        columns.note("turn that its export calls hidden left out")
        return []
    return [{**each, "attachments": about.get("attachments")} for each in turns]
