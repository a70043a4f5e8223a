"""One raw row → chat messages: the usual shapes, user and system turns kept, answers dropped or kept as they are."""

from typing import Any

LISTS_OF_MESSAGES = ("messages", "conversations", "conversation")
SHAPES = (*LISTS_OF_MESSAGES, "turns", "prompt")

ROLES = {
    "system": "system",
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model"), "assistant"),
    **dict.fromkeys(("tool", "function", "function_call", "function_response", "observation", "ipython"), "tool"),
}
# A turn with any of these says more than its content: without them an answer would not be what the model wrote.
PARTS_BESIDE_CONTENT = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")

# What an answer may say of how it was made, when answers are kept: docs/imported-answers.md.
MADE = ("prompt_ids", "output_ids", "finish_reason", "sampling")


class Refused(Exception):
    """Why a row is no prompt. The reason is one of a few fixed phrases and never quotes the row."""

    def __init__(self, reason: str, id: str | None = None):
        super().__init__(reason)
        self.reason = reason
        self.id = id


def messages_of(row: dict, *, keep_answers: bool) -> list[dict[str, Any]]:
    """Return the conversation as [{role, content}], ending with a user turn, or with an answer if `keep_answers`."""
    turns = [(_role(turn), turn) for turn in _turns(row)]
    if any(role == "tool" for role, _ in turns):
        raise Refused("tool turn")
    last = "assistant" if keep_answers else "user"
    while turns and turns[-1][0] != last:
        turns.pop()
    if keep_answers and not turns:
        raise Refused("no assistant turn")
    if keep_answers and "finish_reason" in row:  # of the last answer
        turns[-1] = ("assistant", {"finish_reason": row["finish_reason"], **turns[-1][1]})
    messages = [_message(role, turn) for role, turn in turns if role != "assistant" or keep_answers]
    if not any(message["role"] == "user" for message in messages):
        raise Refused("no user turn")
    # A blank system turn is how many exports write "none"; a template would still render its header.
    return [message for message in messages if message["role"] != "system" or message["content"].strip()]


def _turns(row: dict) -> list[dict]:
    shape = next((key for key in SHAPES if row.get(key) is not None), None)
    if shape is None:
        raise Refused(f"none of {', '.join(SHAPES)}")
    turns = row[shape]
    if shape == "prompt" and isinstance(turns, str):
        turns = [turns]
    if not isinstance(turns, list):
        raise Refused(f"{shape} is not a list")
    if shape not in LISTS_OF_MESSAGES:
        turns = [{"role": "user", "content": turn} if isinstance(turn, str) else turn for turn in turns]
    if not all(isinstance(turn, dict) for turn in turns):
        raise Refused(f"{shape} holds something other than turns")
    return turns


def _role(turn: dict) -> str:
    name = turn.get("role") or turn.get("from")
    role = ROLES.get(name.strip().lower()) if isinstance(name, str) else None
    if role is None:
        raise Refused("unknown role")
    return role


def _message(role: str, turn: dict) -> dict[str, Any]:
    if any(turn.get(part) for part in PARTS_BESIDE_CONTENT):
        raise Refused("turn with parts other than content")
    content = turn.get("content")
    text = _text(turn.get("value") if content is None else content)
    if role == "user" and not text.strip():
        raise Refused("empty user turn")
    return {"role": role, "content": text} | (_made(turn) if role == "assistant" else {})


def _made(turn: dict) -> dict[str, Any]:
    """Return how an answer was made, so far as it says. No text of it is kept: no check of a prompt would see it."""
    made = {key: turn[key] for key in MADE if turn.get(key) is not None}
    if ("prompt_ids" in made) != ("output_ids" in made):
        raise Refused("only one of prompt_ids and output_ids")
    if not all(_are_ids(made[key]) for key in ("prompt_ids", "output_ids") if key in made):
        raise Refused("prompt_ids or output_ids are no list of whole numbers")
    if "finish_reason" in made:
        reason = made["finish_reason"]
        reason = reason.get("type") if isinstance(reason, dict) else reason  # SGLang: {"type": "stop", "matched": 2}
        made["finish_reason"] = reason if reason in ("stop", "length") else "other"
    if "sampling" in made:
        sampling = made["sampling"]
        if not (
            isinstance(sampling, dict) and all(isinstance(value, int | float | None) for value in sampling.values())
        ):
            raise Refused("sampling is no table of numbers")
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
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    raise Refused("content with parts other than text")


def is_unicode(text: str) -> bool:
    """Tell whether UTF-8 can carry the text: half a surrogate pair comes in JSON only."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
