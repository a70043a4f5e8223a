"""The rows of a source → prompts with id, source and licence. No check has seen them yet."""

from collections.abc import Iterator

from eagle3.prompts.reading.conversation import Refused, is_unicode, messages_of
from eagle3.prompts.reading.formats import ID_COLUMNS, LICENSE_COLUMNS
from eagle3.prompts.reading.prompt import Prompt
from eagle3.prompts.reading.sources import Row, Source, read_rows
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
    id = _id(row)
    try:
        messages = messages_of(row, keep_answers=keep_answers)
        license = _license(row, source)
    except Refused as refused:
        raise Refused(refused.reason, source.id_prefix + id if id else None) from None
    return Prompt(
        id=source.id_prefix + (id or sha256_json(messages)[:16]),
        source=_name(row.get("source")) or source.name,
        license=license,
        messages=messages,
    )


def _id(row: dict) -> str | None:
    for column in ID_COLUMNS:
        value = row.get(column)
        if isinstance(value, int):
            return str(value)
        if name := _name(value):
            return name
    return None


def _license(row: dict, source: Source) -> str | None:
    license = next((row[column] for column in LICENSE_COLUMNS if row.get(column)), source.license)
    if license is not None and not isinstance(license, str):
        raise Refused("license is not text")
    return license


def _name(value: object) -> str | None:
    return value if isinstance(value, str) and value.strip() and is_unicode(value) else None
