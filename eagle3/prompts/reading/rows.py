"""The rows of a source → prompts with id, source and licence. No check has seen them yet."""

from collections.abc import Iterator

from eagle3.prompts.reading.conversation import Refused, conversation, is_unicode
from eagle3.prompts.reading.prompt import Prompt
from eagle3.prompts.reading.shapes import Columns
from eagle3.prompts.reading.sources import Row, Source, read_rows
from eagle3.prompts.reading.tools import UnusableTools, tools_of
from eagle3.storage.files import sha256_json


def read_prompts(source: Source, *, keep_answers: bool) -> Iterator[tuple[Row, Prompt | Refused]]:
    """Yield every row of a source with the prompt it holds, or why it holds none."""
    for row in read_rows(source):
        yield row, read_prompt(row.value, source, keep_answers=keep_answers)


def read_prompt(value: object, source: Source, *, keep_answers: bool) -> Prompt | Refused:
    try:
        return _prompt(value, source, keep_answers)
    except Refused as refused:
        return refused


def _prompt(row: object, source: Source, keep_answers: bool) -> Prompt:
    if not isinstance(row, dict):
        raise Refused("not a JSON object")
    columns = source.shape.read(row)
    id = _id(columns)
    try:
        messages = conversation(row, columns, keep_answers=keep_answers, shape=source.shape)
        tools = tools_of(columns, source.shape)
        license = _license(columns, source)
    except (Refused, UnusableTools) as refused:
        raise Refused(str(refused), source.id_prefix + id if id else None) from None
    origins = [name for name in columns.texts("source") if _is_name(name)]
    return Prompt(
        id=source.id_prefix + (id or sha256_json([messages, tools] if tools else messages)[:16]),
        source=origins[0] if origins else source.name,
        license=license,
        messages=messages,
        tools=tools,
        known_as=tuple(dict.fromkeys(origins + columns.texts("model"))),
    )


def _id(columns: Columns) -> str | None:
    for value in columns.all("id"):
        if isinstance(value, int):
            return str(value)
        if isinstance(value, str) and _is_name(value):
            return value
    return None


def _license(columns: Columns, source: Source) -> str | None:
    """Return the row's licences, all of which have to be allowed, or its source's."""
    values = columns.all("license")
    if not values:
        return source.license
    given = [each for value in values for each in (value if isinstance(value, list) else [value])]
    if not all(isinstance(each, str) and is_unicode(each) for each in given):
        raise Refused("license is not text")
    if len(values) == 1 and isinstance(values[0], str):
        return values[0]
    return " AND ".join({" ".join(each.lower().split()): each for each in given}.values())


def _is_name(value: str) -> bool:
    return is_unicode(value) and not value.isspace() and value != ""
