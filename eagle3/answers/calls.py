"""Calls of tools in an answer, held against those that are stored.

How a family writes calls is not kept here: its own template renders the stored ones. Where that rendering holds them as
JSON, the values in the answer and in it are compared; elsewhere, as in XML, the texts are.
"""

import json
import re
from collections.abc import Iterable
from typing import Any

from eagle3.answers.chat import Chat, Messages, RefusedConversation, common_start
from eagle3.prompts.reading.prompt import CALLS

LOSES_CALLS = "the chat template does not render calls of tools, or not all calls of one answer"
ARGUMENTS = ("arguments", "parameters")  # keys next to a name: Hermes, Qwen, Mistral; Llama
DECODER = json.JSONDecoder()

Call = tuple[str, dict[str, Any]]  # the tool's name, and the arguments


def called(chat: Chat, before: Messages, answer_ids: list[int], stored: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the message that a server would return for an answer that makes the stored calls, in their order; None
    if it does not.

    Raises RefusedConversation if the template cannot render the stored calls."""
    written = _written(chat, before, stored)
    opening = _opening(chat, written, stored[0]["function"]["name"])
    text = chat.decode(chat.without_end(answer_ids))
    begin = _end_of_reasoning(chat, text)
    start = text.find(opening, begin)
    content = text[begin if chat.settings["reasoning_parser"] is not None else 0 : max(start, begin)].strip()
    text = text[max(start, begin) :]
    wanted = [_name_and_arguments(each) for each in stored]
    names = {*chat.tool_names, *(name for name, _ in wanted)}
    if _same(calls_in(written, names), wanted):
        own = calls_in(text, names)
        if not _same(own, wanted):
            return None
    else:
        own = [(name, _sort_arguments(text, arguments)) for name, arguments in wanted]
        ordered = _written(chat, before, _with_calls(stored, own))
        if text.split() != ordered[ordered.find(opening) :].split():
            return None
    if start < 0 or chat.holds_control_token(content):  # other marks stand there than a server would return
        content = ""
    return {"role": "assistant", "content": content, CALLS: _with_calls(stored, own)}


def require_calls_rendered(chat: Chat, before: Messages, stored: list[dict[str, Any]]) -> str:
    """Return a conversation that ends with these calls as the template renders it. Raises RefusedConversation if it
    leaves out the last of them: some templates know no calls, some a single one."""
    answer = {"role": "assistant", "content": ""}
    fewer = answer | ({CALLS: stored[:-1]} if stored[1:] else {})
    text = chat.render([*before, {**answer, CALLS: stored}], add_generation_prompt=False)
    if text == chat.render([*before, fewer], add_generation_prompt=False):
        raise RefusedConversation(LOSES_CALLS)
    return text


def calls_in(text: str, names: Iterable[str]) -> list[Call]:
    """Return the calls in a text: JSON objects of a name and arguments, and those of arguments after a tool's name."""
    named = re.compile(rf"(?<![\w-])(?:{'|'.join(sorted(map(re.escape, names), key=len, reverse=True))})(?![\w-])")
    calls: list[Call] = []
    end = 0  # of the last object
    start = text.find("{")
    while start >= 0:
        try:
            value, stop = DECODER.raw_decode(text, start)
        except (ValueError, RecursionError):
            start = text.find("{", start + 1)
            continue
        arguments = next((value[key] for key in ARGUMENTS if key in value), None)
        before = named.findall(text, end, start)
        if arguments is not None and isinstance(value.get("name"), str) and named.fullmatch(value["name"]):
            calls.append((value["name"], arguments))
        elif before:
            calls.append((before[-1], value))
        end, start = stop, text.find("{", stop)
    return calls


def _written(chat: Chat, before: Messages, stored: list[dict[str, Any]]) -> str:
    """Return what the template writes for an answer with these calls, without the end of turn."""
    text = require_calls_rendered(chat, before, stored)
    text = text[len(common_start(text, chat.render(before, add_generation_prompt=True))) :]
    ends = [text.find(chat.token_text(each)) for each in chat.stop_ids]
    return text[: min((end for end in ends if end >= 0), default=None)]


def _opening(chat: Chat, written: str, name: str) -> str:
    """Return the marks before the first call, which is rendered without reasoning and text: up to its name or JSON."""
    opening = re.split(rf"{re.escape(name)}|{{", written, maxsplit=1)[0]
    return opening[_end_of_reasoning(chat, opening) :].strip()


def _end_of_reasoning(chat: Chat, text: str) -> int:
    end = chat.reasoning.end if chat.reasoning else ""
    return text.rfind(end) + len(end) if end and end in text else 0


def _name_and_arguments(call: dict[str, Any]) -> Call:
    return call["function"]["name"], call["function"]["arguments"]


def _with_calls(stored: list[dict[str, Any]], own: list[Call]) -> list[dict[str, Any]]:
    """Return the stored calls with the arguments as the target wrote them."""
    return [
        {**call, "function": {"name": name, "arguments": arguments}}
        for call, (name, arguments) in zip(stored, own, strict=True)
    ]


def _sort_arguments(text: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {key: arguments[key] for key in sorted(arguments, key=text.find)}


def _same(calls: list[Call], others: list[Call]) -> bool:
    """Compare as JSON: the order of keys does not count, 1.0 is 1, and true is not 1."""
    return _plain(calls) == _plain(others)


def _plain(calls: list[Call]) -> str:
    return json.dumps(json.loads(json.dumps(calls), parse_float=_number), sort_keys=True)


def _number(text: str) -> int | float:
    value = float(text)
    return int(value) if value.is_integer() else value
