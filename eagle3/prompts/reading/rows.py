"""The rows of a source → prompts with id, source and licence, before any check."""

from collections.abc import Iterator
from typing import Any

from eagle3.prompts.licenses.terms import join_licenses
from eagle3.prompts.reading.conversation import conversation
from eagle3.prompts.reading.formats import BLANK, NO_END, chunk_rows, cut
from eagle3.prompts.reading.prompt import Prompt, Refused, TemplateKwargs, Tools, is_unicode
from eagle3.prompts.reading.shapes import Columns, json_in
from eagle3.prompts.reading.sources import Source
from eagle3.prompts.reading.tools import is_json, read_tools
from eagle3.settings.precomputing import TEMPLATE_PARAMETERS
from eagle3.storage.files import sha256_json

LONGEST_ORIGIN = 8  # words in the name of a data set


def read_prompts(source: Source) -> Iterator[tuple[object, Prompt | Refused]]:
    """Yield every row of a source, in the order of its files, with its prompt, without answers, or why it has none."""
    for file in source.files:
        for chunk in cut(file, NO_END):  # the whole file
            for _, value in chunk_rows(chunk, source.shape):
                if value is not BLANK:
                    yield value, read_prompt(value, source, keep_answers=False)


def read_prompt(value: Any, source: Source, *, keep_answers: bool) -> Prompt | Refused:
    if not isinstance(value, dict) and not source.shape.is_turns(value):
        return Refused("not a JSON object")
    columns = source.shape.read(value)
    id = _id(columns)
    try:
        if source.written_by and value.get("refused"):
            raise Refused(value["refused"])
        return _prompt(columns, id, source, keep_answers)
    except Refused as refused:
        return Refused(refused.reason, source.id_prefix + id if id else None, refused.name)


def _prompt(columns: Columns, id: str | None, source: Source, keep_answers: bool) -> Prompt:
    messages = conversation(columns, keep_answers=keep_answers)
    tools, template_kwargs = read_tools(columns), _template_kwargs(columns)
    license = _license(columns, source)
    origins = [name for name in columns.texts("source") if _is_name(name)]
    if any(len(name.split()) > LONGEST_ORIGIN or "\n" in name for name in origins):  # of a translation, say
        columns.note("source that is a text, not a name", columns.name("source"))
    return Prompt(
        id=source.id_prefix + (id or _content_id(messages, tools, template_kwargs)),
        source=origins[0] if origins else source.name,
        license=license,
        messages=messages,
        tools=tools,
        chat_template_kwargs=template_kwargs or None,
        known_as=tuple(dict.fromkeys(origins + columns.texts("model"))),
        notes=() if source.written_by else tuple(dict.fromkeys(columns.notes)),  # of rows of our own
    )


def _id(columns: Columns) -> str | None:
    for value in columns.all("id"):
        if isinstance(value, int):
            return str(value)
        if isinstance(value, str) and _is_name(value):
            return value
    return None


def _content_id(messages: list[dict[str, Any]], tools: Tools | None, template_kwargs: TemplateKwargs) -> str:
    rest = [template_kwargs] if template_kwargs else []
    return sha256_json([messages, tools, *rest] if tools or rest else messages)[:16]


def _template_kwargs(columns: Columns) -> TemplateKwargs:
    """Return the row's variables for the chat template. Those without a value are not set: null, and empty lists, as
    SmolTalk2 has them."""
    variables: TemplateKwargs = {}
    for name, value in columns.found.get("chat_template_kwargs", ()):
        value = json_in(value, "{")
        given = value if isinstance(value, dict) else {name.lower().rpartition(".")[2]: value}
        variables |= {key: each for key, each in given.items() if each not in (None, [], {}) and key not in variables}
    for key, value in variables.items():
        if not (key.isidentifier() and is_unicode(key) and isinstance(value, str | int | float) and is_json(value)):
            raise Refused("chat_template_kwargs other than texts, numbers, true and false by name")
        if key in TEMPLATE_PARAMETERS:
            raise Refused(f"chat_template_kwargs with {key}, which is no variable of a template")
    return variables


def _license(columns: Columns, source: Source) -> str | None:
    """Return the row's licences, all of which must be allowed, or else the source's."""
    given = columns.parts("license")
    if not given:
        return source.terms.license
    if not all(isinstance(each, str) and is_unicode(each) for each in given):
        raise Refused("license is not text")
    return join_licenses({" ".join(each.lower().split()): each for each in given}.values())


def _is_name(value: str) -> bool:
    return is_unicode(value) and not value.isspace() and value != ""
