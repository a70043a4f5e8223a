"""Tools of a row: their definitions, the calls that it stores, and the results of these."""

import ast
import re
import warnings
from typing import Any

from eagle3.prompts.reading.prompt import Refused, Tools, is_unicode, tools_text
from eagle3.prompts.reading.shapes import TWICE, Columns, Layout, from_json, is_empty, json_in

Turn = tuple[str, dict]  # its role, and as it is written

TOOL_COLUMNS = ("tools", "functions", "available_tools")  # or the last part of a name
OF_A_FUNCTION = frozenset(("type", "name", "description", "parameters", "input_schema", "strict"))
# Keys of a definition: OpenAI's and Anthropic's, those with api ToolBench's.
NAMES = ("name", "api_name")
PARAMETERS = frozenset(("parameters", "input_schema", "required_parameters"))
CALL_KEYS = ("tool_calls", "function_call")  # of an assistant turn
ARGUMENTS = ("arguments", "parameters", "args", "input")  # of a call; the last two LangChain's and Anthropic's
OF_A_RESULT = frozenset(("tool_call_id", "call_id", "id", "name", "status", "output"))  # next to its content

# Hermes and what is converted to it: calls and results are marked in the text.
CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
RESULT = re.compile(r"<tool_response>(.*?)</tool_response>", re.DOTALL)
LONGEST_LITERAL = 20_000  # characters that are read as Python

KEPT = "calls and results of tools kept"
LEFT_OUT = "turns left out from a call of a tool on"
NO_TOOLS, UNREADABLE, NO_RESULT, OTHER_RESULT = (
    "the row names no tools", "it cannot be read", "it has no result", "a result is not its own"
)  # fmt: skip


class _LeftOut(Exception):
    """Why a call and all turns after it are left out."""


def read_tools(columns: Columns) -> Tools | None:
    """Return [{"type": "function", "function": {"name", …}}] as templates take it, None if a row has no tools.

    Reads OpenAI's two forms: the function in an object of its own, or its keys next to `type`; each may be JSON text.
    """
    if not columns.shape.keeps_tools:
        return None
    value = next((value for name, value in columns.found.get("attachments", ()) if holds_tools(name)), None)
    if value is None:
        return None
    tools = from_json(value) if isinstance(value, str) else value
    if not isinstance(tools, list):
        raise Refused("tools that are no list")
    functions = [_function(from_json(tool) if isinstance(tool, str) else tool) for tool in tools]
    if not is_json(functions):
        raise Refused("tools that are no JSON in valid Unicode, without a key twice")
    return functions


def holds_tools(column: str) -> bool:
    return column.lower().rpartition(".")[2] in TOOL_COLUMNS


def are_definitions(value: Any) -> bool:
    """Tell whether a value, in a column of any name, defines a tool or several."""
    value = json_in(value)
    tool = value[0] if isinstance(value, list) and value else value
    tool = tool.get("function", tool) if isinstance(tool, dict) else None
    return (
        isinstance(tool, dict)
        and any(isinstance(tool.get(key), str) for key in NAMES)
        and not PARAMETERS.isdisjoint(tool)
    )


def _function(tool: Any) -> dict[str, Any]:
    is_function = isinstance(tool, dict) and tool.get("type", "function") == "function"
    function = tool.get("function", tool) if is_function else None
    if not isinstance(function, dict) or (function is tool and not OF_A_FUNCTION.issuperset(tool)):
        raise Refused("tools other than functions")
    if not isinstance(function.get("name"), str) or not function["name"].strip():
        raise Refused("tools without a name")
    if "input_schema" in function:  # Anthropic's
        function = {("parameters" if key == "input_schema" else key): part for key, part in function.items()}
    parameters = function.get("parameters") or {}
    if not isinstance(parameters, dict) or None in (parameters.get("properties") or {}).values():
        raise Refused("tools with empty parameters, as tables fill them in: give them as JSON text")
    return {"type": "function", "function": {key: part for key, part in function.items() if key != "type"}}


def is_json(value: Any) -> bool:
    """Tell whether JSON in valid Unicode, without a key twice, can hold the value."""
    try:
        text = tools_text(value)
        return is_unicode(text) and f'{TWICE}":' not in text
    except (TypeError, ValueError, RecursionError):
        return False


# --- calls and results ---


def with_tool_turns(turns: list[Turn], columns: Columns, *, keep_answers: bool) -> list[Turn]:
    """Return the turns with each call as ("call", {"tool_calls"}) and each result as ("tool", {content, …}).

    A call is what the target's own is compared with, and its results are given to the target. Turns from a call on
    that allows neither are left out, and noted. With `keep_answers` all turns are kept, and a call in the text of an
    answer stays there.
    """
    has_tools = any(holds_tools(name) for name, _ in columns.found.get("attachments", ()))
    reading = _ToolTurns(columns.shape, has_tools=has_tools, keep_answers=keep_answers)
    for place, (role, turn) in enumerate(turns):
        try:
            reading.add(role, turn)
        except _LeftOut as reason:
            if any(role in ("user", "tool") for role, _ in turns[place:]):  # a last call is left out as any answer
                columns.note(f"{LEFT_OUT}: {reason}")
            del reading.turns[reading.whole :]
            break
    if any(role == "tool" for role, _ in reading.turns):
        columns.note(KEPT)
    return reading.turns


class _ToolTurns:
    """turns: those that are read; whole: how many of them come before the last calls."""

    def __init__(self, shape: Layout, *, has_tools: bool, keep_answers: bool):
        self.shape, self.has_tools, self.keep_answers = shape, has_tools, keep_answers
        self.turns: list[Turn] = []
        self.whole = 0
        self.number = 0  # of calls so far
        # The last calls: the row's own id, the one that is written, and the tool's name.
        self.called: list[tuple[str | None, str, str]] = []
        self.results = 0  # of the last calls

    def add(self, role: str, turn: dict) -> None:
        calls = _calls(role, turn, self.shape, in_text=not self.keep_answers)
        if calls is not None:
            self._add_calls(calls, turn if role == "assistant" and self.keep_answers else {})
        elif role == "tool":
            self._add_results(turn)
        else:
            if self.called and not self.results and not self.keep_answers:
                raise _LeftOut(NO_RESULT)
            self.turns.append((role, turn))
            self.whole, self.called = len(self.turns), []

    def _add_calls(self, calls: list[dict[str, Any]], answer: dict) -> None:
        """Add calls, next to what else is kept of their answer."""
        follows = bool(self.turns) and self.turns[-1][0] == "call"  # several at a time may have a turn each
        if not follows:
            self.whole, self.called, self.results = len(self.turns), [], 0
        self._require_tools()
        if not calls:
            raise _LeftOut(UNREADABLE)
        written = []
        for call in calls:
            # Some templates want nine letters and digits.
            id = f"call{self.number:05d}"
            self.number += 1
            self.called.append((call["id"], id, call["function"]["name"]))
            written.append({"type": "function", "id": id, "function": call["function"]})
        if follows and not self.keep_answers:
            self.turns[-1][1]["tool_calls"].extend(written)
        else:
            self.turns.append(("call", {**answer, "tool_calls": written}))

    def _add_results(self, turn: dict) -> None:
        content = self.shape.of_turn(turn, "content")
        content = turn.get("output") if content is None else content
        if not self.keep_answers and not self.called:
            self._require_tools()
            raise _LeftOut(UNREADABLE)
        marked = RESULT.findall(content) if isinstance(content, str) and not RESULT.sub("", content).strip() else []
        for each in [text.strip() for text in marked] or [content]:
            # Only what is in a call, too: no check of a prompt would read another id or name.
            names = self.shape.fields["content"]
            result = {key: value for key, value in turn.items() if key not in ("tool_call_id", "name", *names)}
            result[names[0]] = each
            if (call := self._find_call(turn)) is not None:
                _, result["tool_call_id"], name = call
                result |= {"name": name} if turn.get("name") == name else {}
            self.turns.append(("tool", result))
            self.results += 1

    def _find_call(self, turn: dict) -> tuple[str | None, str, str] | None:
        """Return the call that has this result: by the row's own ids, or else by order."""
        own = turn.get("tool_call_id") or turn.get("call_id")
        ids = [id for id, *_ in self.called]
        if own is None or not any(ids):
            found = self.called[self.results : self.results + 1]
        else:
            found = [call for call in self.called if call[0] == own]
        if found:
            return found[0]
        if self.keep_answers:
            return None
        raise _LeftOut(OTHER_RESULT)

    def _require_tools(self) -> None:
        if not self.has_tools and not self.keep_answers:
            raise _LeftOut(NO_TOOLS)


def _calls(role: str, turn: dict, shape: Layout, *, in_text: bool) -> list[dict[str, Any]] | None:
    """Return the calls of a turn; None if it makes none, an empty list if they cannot be read."""
    if role not in ("assistant", "call"):
        return None
    value = next((turn[key] for key in CALL_KEYS if not is_empty(turn.get(key))), None)
    content = shape.of_turn(turn, "content")
    if value is None and role == "call":
        value = turn if "arguments" in turn else content  # an item of the Responses API, or the text of the call
    elif value is None and in_text and isinstance(content, str):
        value = CALL.findall(content) or None
    if value is None:
        return None if role == "assistant" else []
    value = _parse_value(value)
    calls = [_call(_parse_value(each)) for each in (value if isinstance(value, list) else [value])]
    return [] if None in calls else [call for call in calls if call is not None]


def _call(value: Any) -> dict[str, Any] | None:
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict):
        return None
    arguments = _parse_value(next((function[key] for key in ARGUMENTS if function.get(key)), {}))
    name, id = function.get("name"), value.get("id") or value.get("call_id")
    if not (isinstance(name, str) and name.strip() and isinstance(arguments, dict) and is_json([name, arguments])):
        return None
    return {"id": id if isinstance(id, str) else None, "function": {"name": name, "arguments": arguments}}


def _parse_value(value: Any) -> Any:
    """Return the value of a text in JSON, or as Python writes it, which Hermes' sets have; other values as they are."""
    if not isinstance(value, str):
        return value
    found = from_json(value)
    if found is None and len(value) <= LONGEST_LITERAL:
        try:
            with warnings.catch_warnings(action="ignore"):  # of escapes
                found = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return None
    return found
