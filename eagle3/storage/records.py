"""Records: plain data as JSON, sealed against damage in files and in lines of files."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from eagle3.errors import InputError
from eagle3.storage.files import json_line, json_text, read_json, write_whole

# The last key of a sealed JSON object is the sha256 of everything before it, in a file indented by 1 or in a line: any
# flipped byte, cut or edit shows.
SEAL = re.compile(rb',\n? "seal": "([0-9a-f]{64})"(\n?\}\n)\Z')
LONGEST_SEAL = 80


def seal(text: bytes) -> bytes:
    """Add the seal to a JSON object of one or more keys, with a newline after its closing brace."""
    is_file = text.endswith(b"\n}\n")
    body = text.removesuffix(b"\n}\n" if is_file else b"}\n")
    assert body != text
    form = b',\n "seal": "%s"\n}\n' if is_file else b', "seal": "%s"}\n'
    return body + form % hashlib.sha256(body).hexdigest().encode()


def unseal(content: bytes, *, source: str, remedy: str) -> bytes:
    """Return the JSON without its seal; InputError where they do not fit together."""
    found = SEAL.search(content, max(0, len(content) - LONGEST_SEAL))
    if found is None or hashlib.sha256(content[: found.start()]).hexdigest() != found[1].decode():
        raise InputError(f"{source}: damaged or edited, it does not have the sha256 at its end; {remedy}")
    return content[: found.start()] + found[2]


def write_sealed_json(path: Path, value: dict[str, Any]) -> None:
    write_whole(path, seal(json_text(value)))


def read_sealed_json(path: Path, *, made_by: str) -> dict[str, Any]:
    """Parse what `write_sealed_json` wrote; errors as in `read_json`."""
    value = read_json(path, made_by=made_by)
    unseal(path.read_bytes(), source=str(path), remedy=f"move it away, then: {made_by}")
    del value["seal"]
    return value


def sealed_line(row: dict[str, Any]) -> bytes:
    """Write a row of one or more keys as a line of a file that grows until it is finished."""
    return seal(json_line(row))


# --- records ---------------------------------------------------------------------------------------------------------

UNION_PARTS = ("str", "list[str]", "[key]")  # in the places that pydantic names


class Record:
    """A frozen dataclass that is written as JSON. What is read is checked against its fields: nothing may be missing,
    unknown or of another type. One with a FORMAT_VERSION has a field `format_version` of the same number; those of
    OLDER_VERSIONS are read too. `FOUND_IN` is the folder that has it, for who names a folder with another record."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)
    FORMAT_VERSION: ClassVar[int | None] = None
    OLDER_VERSIONS: ClassVar[tuple[int, ...]] = ()
    FOUND_IN: ClassVar[str | None] = None

    @classmethod
    @cache  # slow to make
    def adapter(cls) -> TypeAdapter[Any]:
        return TypeAdapter(cls)


AnyRecord = TypeVar("AnyRecord", bound=Record)


def parse_record(content: bytes, kind: type[AnyRecord], *, source: str, remedy: str) -> AnyRecord:
    """Read a record from JSON. InputError names `source`, the field, what is wrong with it and the `remedy`."""
    _require_version(content, kind, source, remedy)
    try:
        return kind.adapter().validate_json(content)
    except ValidationError as error:
        raise InputError(f"{source}: {_in_words(error.errors()[0])}; {remedy}") from None


def parse_sealed(content: bytes, kind: type[AnyRecord], *, source: str, remedy: str) -> AnyRecord:
    """Read a record from a file of its own. What another version or program wrote is reported as such."""
    _require_version(content, kind, source, remedy)
    if not SEAL.search(content[-LONGEST_SEAL:]):
        parse_record(content, kind, source=source, remedy=remedy)
    return parse_record(unseal(content, source=source, remedy=remedy), kind, source=source, remedy=remedy)


def _require_version(content: bytes, kind: type[Record], source: str, remedy: str) -> None:
    if kind.FORMAT_VERSION is None or (version := read_version(content)) is None:
        return
    names = {each.name for each in fields(kind)} - {"format_version"}  # type: ignore[arg-type]
    if kind.FOUND_IN and names.isdisjoint(json.loads(content)):
        raise InputError(f"{source} is of another stage, and this needs {kind.FOUND_IN}; give that folder")
    if version not in (kind.FORMAT_VERSION, *kind.OLDER_VERSIONS):
        raise InputError(f"{source}: format_version={version}, this code reads {kind.FORMAT_VERSION}; {remedy}")


def read_version(content: bytes) -> int | None:
    """Return the format version that a record states; None where it states none, for the seal or the parser to say."""
    try:
        version = json.loads(content)["format_version"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return version if isinstance(version, int) else None


def _in_words(fault: Mapping[str, Any]) -> str:
    """Say what is wrong in which field; show the value only if it is a number, as a text may be user data."""
    field = ".".join(str(part) for part in fault["loc"] if part not in UNION_PARTS)
    if fault["type"] == "missing":
        return f"{field} is missing"
    if fault["type"] == "unexpected_keyword_argument":
        return f"{field} is unknown"
    given = f"={fault['input']}" if isinstance(fault["input"], int | float | NoneType) else ""
    return f"{field}{given}: {fault['msg']}" if field else fault["msg"].removeprefix("Value error, ")


def record_bytes(record: Record) -> bytes:
    return record.adapter().dump_json(record, indent=1) + b"\n"


def sealed_bytes(record: Record) -> bytes:
    """Return a record as a file of its own, which `parse_sealed` reads."""
    return seal(record_bytes(record))
