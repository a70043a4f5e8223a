"""The rows of a source → prompts with id, source and licence, before any check."""

from collections.abc import Iterator

from eagle3.prompts.licenses.terms import all_of
from eagle3.prompts.reading.conversation import conversation, tools_of
from eagle3.prompts.reading.formats import BLANK, NO_END, chunk_rows, cut
from eagle3.prompts.reading.prompt import Prompt, Refused, is_unicode
from eagle3.prompts.reading.shapes import Columns
from eagle3.prompts.reading.sources import Source
from eagle3.storage.files import sha256_json


def read_prompts(source: Source) -> Iterator[tuple[object, Prompt | Refused]]:
    """Yield every row of a source, in the order of its files, with its prompt, without answers, or why it has none."""
    for file in source.files:
        for chunk in cut(file, NO_END):  # the whole file
            for _, value in chunk_rows(chunk, source.shape.wanted):
                if value is not BLANK:
                    yield value, read_prompt(value, source, keep_answers=False)


def read_prompt(value: object, source: Source, *, keep_answers: bool) -> Prompt | Refused:
    if not isinstance(value, dict):
        return Refused("not a JSON object")
    columns = source.shape.read(value)
    id = _id(columns)
    try:
        if source.written_by and value.get("refused"):
            raise Refused(value["refused"])
        return _prompt(columns, id, source, keep_answers)
    except Refused as refused:
        return Refused(refused.reason, source.id_prefix + id if id else None)


def _prompt(columns: Columns, id: str | None, source: Source, keep_answers: bool) -> Prompt:
    messages = conversation(columns, keep_answers=keep_answers)
    tools = tools_of(columns)
    license = _license(columns, source)
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
    """Return the row's licences, all of which must be allowed, or else the source's."""
    given = columns.parts("license")
    if not given:
        return source.terms.license
    if not all(isinstance(each, str) and is_unicode(each) for each in given):
        raise Refused("license is not text")
    return all_of({" ".join(each.lower().split()): each for each in given}.values())


def _is_name(value: str) -> bool:
    return is_unicode(value) and not value.isspace() and value != ""
