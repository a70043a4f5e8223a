"""The tools that a row offers beside its conversation → definitions as chat templates take them."""

import json
from typing import Any

from eagle3.prompts.reading.shapes import Columns, Shape, from_json

NAMES = ("tools", "functions")  # of their columns, or of the last part of such a name
OF_A_FUNCTION = frozenset(("type", "name", "description", "parameters", "strict"))

Tools = list[dict[str, Any]]


class UnusableTools(Exception):
    """Why the tools of a row cannot be given to a template: a fixed phrase that never quotes them."""


def tools_of(columns: Columns, shape: Shape) -> Tools | None:
    """Return [{"type": "function", "function": {"name", …}}] as templates take it, None where a row has no tools.

    The usual two forms are read: OpenAI's for conversations, and the one with the name beside the type.
    """
    if not shape.keeps_tools:
        return None
    value = next((value for name, value in columns.found.get("beside", ()) if holds_tools(name)), None)
    if value is None:
        return None
    tools = from_json(value) if isinstance(value, str) else value
    if not isinstance(tools, list):
        raise UnusableTools("tools that are no list")
    functions = [_function(tool) for tool in tools]
    if not _is_plain(functions):
        raise UnusableTools("tools that are no JSON in valid Unicode")
    return functions


def holds_tools(column: str) -> bool:
    return column.lower().rpartition(".")[2] in NAMES


def _function(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type", "function") != "function":
        raise UnusableTools("tools other than functions")
    function = tool.get("function", tool)
    if not isinstance(function, dict) or (function is tool and not OF_A_FUNCTION.issuperset(tool)):
        raise UnusableTools("tools other than functions")
    if not isinstance(function.get("name"), str) or not function["name"].strip():
        raise UnusableTools("tools without a name")
    parameters = function.get("parameters") or {}
    if not isinstance(parameters, dict) or None in (parameters.get("properties") or {}).values():
        raise UnusableTools("tools with empty parameters, as tables fill them in: give them as JSON text")
    return {"type": "function", "function": {key: part for key, part in function.items() if key != "type"}}


def _is_plain(tools: Tools) -> bool:
    try:
        tools_text(tools).encode()
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def tools_text(tools: Tools) -> str:
    return json.dumps(tools, ensure_ascii=False, allow_nan=False)
