"""The content of a turn → its text, and whether it says anything."""

import re
from typing import Any

from eagle3.prompts.reading.prompt import Refused, is_unicode
from eagle3.prompts.reading.shapes import Columns, from_json, is_missing

BETWEEN_PARTS = "\n"  # as vLLM joins them; SGLang puts a space, which would run into code and lists
TEXT_PARTS = ("text", "input_text", "output_text")
# A value of Python with texts in it, from its start to its end.
PYTHON_VALUE = re.compile(r"\s*[\[{]+'[^'\n]*'\s*[:,\]].*[\]}]\s*", re.DOTALL)


def content_text(content: Any, columns: Columns) -> str:
    """Return the text of a content, whose parts are joined. Raises Refused if it is no text."""
    content = _parts(content)
    if isinstance(content, list):
        if len(content) > 1:
            columns.note("text parts of a turn joined")
        content = BETWEEN_PARTS.join(_part(part) for part in content)
    if not isinstance(content, str):
        raise Refused("turn without content" if content is None else "content is not text")
    if not is_unicode(content):
        raise Refused("content is not valid Unicode")
    return content


def _parts(content: Any) -> Any:
    if isinstance(content, dict):  # one part, as MCP has it, or Gemini's and ChatGPT's object around its parts
        return content["parts"] if isinstance(content.get("parts"), list) else [content]
    return content


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    is_bedrock = isinstance(part, dict) and [*part] == ["text"]  # its parts have no type
    text = part["text"] if is_bedrock else _text_in(part)
    if not isinstance(text, str):
        raise Refused("content with parts other than text")
    return text


def _is_blank(content: Any) -> bool:
    """Tell whether a content shows nothing: spaces, and signs without a width, such as U+200B."""
    if not isinstance(content, str):
        return content is None
    return not any(each.isprintable() and not each.isspace() for each in content)


def is_none(content: Any) -> bool:
    """Tell whether a content is blank, or a word such as None."""
    if isinstance(content, dict | list):
        try:
            content = BETWEEN_PARTS.join(map(_part, _parts(content)))
        except Refused:
            return False
    return _is_blank(content) or is_missing(content)


def require_text(role: str, text: str, columns: Columns) -> None:
    """Refuse a turn with turns as JSON, and a user turn without text; note one that is a value of JSON or Python.

    It may be a list or an object of a column that an export wrote as text, or a user's question.
    """
    if role == "user" and _is_blank(text):
        raise Refused("empty user turn")
    value = from_json(text) if text.lstrip().startswith(("{", "[", '"')) else None
    parts: list[Any] = value if isinstance(value, list) else [value]
    shape = columns.shape
    roles = [shape.role_in(part) for part in parts if shape.is_turns([part])]
    if any(roles) or any(isinstance(_text_in(part), str) for part in parts):
        raise Refused(f"{role} turn with turns or their parts as JSON text: write them as JSON")
    if role == "user" and (value is not None or PYTHON_VALUE.fullmatch(text)):
        columns.note("user turn that is a value of JSON or Python", columns.conversation_column())


def _text_in(part: Any) -> Any:
    """Return the text of a part, if it is of text; the second key is OpenTelemetry's, the third LLaMA-Factory's."""
    if not isinstance(part, dict) or part.get("type") not in TEXT_PARTS:
        return None
    return next((part[key] for key in ("text", "content", "value") if key in part), None)
