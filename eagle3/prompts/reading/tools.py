"""The tools of a row → definitions as chat templates take them."""

from typing import Any

from eagle3.prompts.reading.prompt import Refused, Tools, tools_text
from eagle3.prompts.reading.shapes import Columns, Shape, from_json

NAMES = ("tools", "functions")  # of their columns, or of the last part of such a name
OF_A_FUNCTION = frozenset(("type", "name", "description", "parameters", "strict"))


def tools_of(columns: Columns, shape: Shape) -> Tools | None:
    """Return [{"type": "function", "function": {"name", …}}] as templates take it, None if a row has no tools.

    Reads OpenAI's two forms: the function in an object of its own, or its keys next to `type`.
    """
    if not shape.keeps_tools:
        return None
    value = next((value for name, value in columns.found.get("attachments", ()) if holds_tools(name)), None)
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


def holds_tools(column: str) -> bool:
    return column.lower().rpartition(".")[2] in NAMES


def _function(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type", "function") != "function":
        raise Refused("tools other than functions")
    function = tool.get("function", tool)
    if not isinstance(function, dict) or (function is tool and not OF_A_FUNCTION.issuperset(tool)):
        raise Refused("tools other than functions")
    if not isinstance(function.get("name"), str) or not function["name"].strip():
        raise Refused("tools without a name")
    parameters = function.get("parameters") or {}
    if not isinstance(parameters, dict) or None in (parameters.get("properties") or {}).values():
        raise Refused("tools with empty parameters, as tables fill them in: give them as JSON text")
    return {"type": "function", "function": {key: part for key, part in function.items() if key != "type"}}
