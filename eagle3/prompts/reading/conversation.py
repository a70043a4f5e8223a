"""One raw row → chat messages and tools. Keeps user and system turns; drops answers, or keeps them unchanged."""

import re
from typing import Any

from eagle3.prompts.reading.prompt import Refused, Tools, is_unicode, tools_text
from eagle3.prompts.reading.shapes import CONVERSATION, Columns, Layout, from_json, is_empty

# A turn with any of these has more than its content: without them an answer is not what the model wrote.
PARTS_BESIDE_CONTENT = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")

# Keys of a kept answer that say how it was made: docs/how-to/imported-answers.md.
MADE = ("prompt_ids", "output_ids", "finish_reason")
# Keys of a turn that keep it from training, each with the values that do: of OpenAI and Mistral (weight), axolotl
# (train, training), ms-swift (loss), torchtune (masked).
NOT_TRAINED = {
    **dict.fromkeys(("weight", "train", "training", "train_on_turn", "trainable", "trained", "loss", "loss_mask"),
                    (0, "0", "false", "False")),
    **dict.fromkeys(("masked", "mask"), (1, "1", "true", "True")),
}  # fmt: skip

# Conversations rendered into one text: their markers cannot be told from those that a user quotes.
RENDERED = re.compile(
    r"<\|im_start\|>|<\|start_header_id\|>|<start_of_turn>|\[/INST\]|^###? ?(?:Human|Assistant|Response):"
    r"|^Human: .*^Assistant:",
    re.MULTILINE | re.DOTALL,
)
TEXT_PARTS = ("text", "input_text", "output_text")

TOOL_COLUMNS = ("tools", "functions")  # or the last part of a name
OF_A_FUNCTION = frozenset(("type", "name", "description", "parameters", "strict"))


def conversation(columns: Columns, *, keep_answers: bool) -> list[dict[str, Any]]:
    """Return [{role, content}], ending with a user turn, or with an answer if `keep_answers`. Raises Refused."""
    shape = columns.shape
    for name, _ in columns.found.get("attachments", ()):
        if not (shape.keeps_tools and _holds_tools(name)):
            raise Refused(f"row with {name}")
    turns = _with_columns([(_role(turn, shape), turn) for turn in _turns(columns)], columns)
    if any(role == "tool" for role, _ in turns):
        raise Refused("tool turn")
    last = "assistant" if keep_answers else "user"
    while turns and turns[-1][0] != last:
        turns.pop()
    if keep_answers and not turns:
        raise Refused("no assistant turn")
    if keep_answers and (reason := columns.first("finish_reason")):  # of the last answer
        turns[-1] = ("assistant", {"finish_reason": reason, **turns[-1][1]})
    messages = [_message(role, turn, shape) for role, turn in turns if role != "assistant" or keep_answers]
    if "user" not in [message["role"] for message in messages]:
        raise Refused("no user turn")
    # Many exports write a blank system turn for "none"; a template would still render its header.
    return [message for message in messages if message["role"] != "system" or message["content"].strip()]


def _turns(columns: Columns) -> list[dict]:
    for kind in CONVERSATION:
        if name := columns.name(kind):
            break
    else:  # the columns have other names, or they are empty
        names = {name.lower() for kind in CONVERSATION for name in columns.shape.fields[kind]}
        found = any(str(column).lower() in names for column in columns.row)
        raise Refused("no user turn" if found else "no column of messages or prompts")
    turns = columns.first(kind)
    if isinstance(turns, str) and kind != "prompt":
        turns = from_json(turns)
    if isinstance(turns, str):
        return _of_prompt(turns, columns)
    if not isinstance(turns, list):
        raise Refused(f"{name} is not a list")
    if kind != "messages":
        turns = [{"role": "user", "content": turn} if isinstance(turn, str) else turn for turn in turns]
    for turn in turns:
        if not isinstance(turn, dict):
            raise Refused(f"{name} holds something other than turns")
    return turns


def _of_prompt(text: str, columns: Columns) -> list[dict]:
    """Return the turns of a row that has one question in a column, with its context."""
    shape = columns.shape
    if columns.name("part_of") or shape.role_of(shape.of_turn(columns.row, "role")) not in (None, "user"):
        raise Refused("one turn of a conversation")
    if columns.name("prompt") == "text" and RENDERED.search(text):
        raise Refused("text with the turns of a rendered conversation")
    context = next((value for value in columns.all("context") if value != text), None)
    if context is not None and not isinstance(context, str):
        raise Refused("context is not text")
    return [{"role": "user", "content": f"{text}\n\n{context}" if context else text}]


def _with_columns(turns: list[tuple[str, dict]], columns: Columns) -> list[tuple[str, dict]]:
    """Add the system turn and the answer from columns of their own, if the turns have none."""
    system, answer = columns.first("system"), columns.first("answer")
    if system is not None:
        if any(role == "system" for role, _ in turns):
            raise Refused("a system prompt in the turns and one in a column")
        turns = [("system", {"content": system}), *turns]
    if isinstance(answer, str) and turns and turns[-1][0] == "user":
        turns = [*turns, ("assistant", {"content": answer})]
    return turns


def _role(turn: dict, shape: Layout) -> str:
    role = shape.role_of(shape.of_turn(turn, "role"))
    if role is None:
        raise Refused("unknown role")
    return role


def _message(role: str, turn: dict, shape: Layout) -> dict[str, Any]:
    if any(turn.get(part) for part in PARTS_BESIDE_CONTENT):
        raise Refused("turn with parts other than content")
    for name in shape.fields["attachments"]:  # Ollama's messages have `images`
        if not is_empty(turn.get(name)):
            raise Refused(f"turn with {name}")
    text = _text(shape.of_turn(turn, "content"))
    if role == "user" and not text.strip():
        raise Refused("empty user turn")
    message = {"role": role, "content": text}
    return message | _made(turn) if role == "assistant" else message


def _made(turn: dict) -> dict[str, Any]:
    """Return how an answer was made, if it says so. Text in it is not kept: no check of a prompt would read it."""
    made = {key: turn[key] for key in MADE if turn.get(key) is not None}
    if any(turn.get(key) in values for key, values in NOT_TRAINED.items()):
        made["trained"] = False
    if ("prompt_ids" in made) != ("output_ids" in made):
        raise Refused("only one of prompt_ids and output_ids")
    if not all(_are_ids(made[key]) for key in ("prompt_ids", "output_ids") if key in made):
        raise Refused("prompt_ids or output_ids are no list of whole numbers")
    if "finish_reason" in made:
        reason = made["finish_reason"]
        reason = reason.get("type") if isinstance(reason, dict) else reason  # SGLang: {"type": "stop", "matched": 2}
        made["finish_reason"] = reason if reason in ("stop", "length") else "other"
    return made


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int and each >= 0 for each in value)


def _text(content: Any) -> str:
    if isinstance(content, list):
        content = "".join(_part(part) for part in content)
    if not isinstance(content, str):
        raise Refused("content is not text")
    if not is_unicode(content):
        raise Refused("content is not valid Unicode")
    return content


def _part(part: Any) -> str:
    if isinstance(part, dict) and part.get("type") in TEXT_PARTS and isinstance(part.get("text"), str):
        return part["text"]
    raise Refused("content with parts other than text")


def tools_of(columns: Columns) -> Tools | None:
    """Return [{"type": "function", "function": {"name", …}}] as templates take it, None if a row has no tools.

    Reads OpenAI's two forms: the function in an object of its own, or its keys next to `type`.
    """
    if not columns.shape.keeps_tools:
        return None
    value = next((value for name, value in columns.found.get("attachments", ()) if _holds_tools(name)), None)
    if value is None:
        return None
    tools = from_json(value) if isinstance(value, str) else value
    if not isinstance(tools, list):
        raise Refused("tools that are no list")
    functions = [_function(tool) for tool in tools]
    try:
        tools_text(functions).encode()
    except (TypeError, ValueError, RecursionError):
        raise Refused("tools that are no JSON in valid Unicode") from None
    return functions


def _holds_tools(column: str) -> bool:
    return column.lower().rpartition(".")[2] in TOOL_COLUMNS


def _function(tool: Any) -> dict[str, Any]:
    is_function = isinstance(tool, dict) and tool.get("type", "function") == "function"
    function = tool.get("function", tool) if is_function else None
    if not isinstance(function, dict) or (function is tool and not OF_A_FUNCTION.issuperset(tool)):
        raise Refused("tools other than functions")
    if not isinstance(function.get("name"), str) or not function["name"].strip():
        raise Refused("tools without a name")
    parameters = function.get("parameters") or {}
    if not isinstance(parameters, dict) or None in (parameters.get("properties") or {}).values():
        raise Refused("tools with empty parameters, as tables fill them in: give them as JSON text")
    return {"type": "function", "function": {key: part for key, part in function.items() if key != "type"}}
