"""File formats of sources, cut into chunks that a worker opens by itself. Local paths and fsspec URLs."""

import codecs
import io
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import fsspec

from eagle3.errors import InputError
from eagle3.prompts.reading.media import FILE_PARTS, names_media
from eagle3.prompts.reading.shapes import TURN_OF, UNREAD, Layout, from_json, plain_name, read_json
from eagle3.secrets import without_query

PLAIN = (".jsonl", ".ndjson", ".json")  # read without pyarrow
TABLE = ".parquet"
PACKINGS = {".gz": "gzip", ".zst": "zstd"}
FORMATS = (*PLAIN, TABLE, *(f"{plain}{packing}" for plain in PLAIN for packing in PACKINGS))

BLOCK = 1 << 20  # bytes per request to a remote store; fsspec's default of 50 MB would fetch chunks many times
NO_END = 1 << 62
HEAD = 32  # bytes of a file that tell its format
NAMED_KEYS = 5  # in an error
SPLIT_KEYS = 3  # columns, data and index
OF_ONE_TALK = frozenset(("dialog", "dialogue", "chat", "thread", "transcript", "utterances"))  # names of its turns

UTF_16 = "UTF-16, not UTF-8", "convert it, e.g. with iconv -f UTF-16 -t UTF-8"
UTF_32 = "UTF-32, not UTF-8", "convert it, e.g. with iconv -f UTF-32 -t UTF-8"
# By their first bytes, those of UTF-32 before those of UTF-16, which they begin with.
OTHER_FORMATS = {
    **dict.fromkeys((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE), UTF_32),
    **dict.fromkeys((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, b"{\0", b"\0{", b"[\0", b"\0["), UTF_16),
    b"\x1f\x8b": ("packed with gzip", "rename it to end in .jsonl.gz"),
    b"\x28\xb5\x2f\xfd": ("packed with zstd", "rename it to end in .jsonl.zst"),
    b"BZh": ("packed with bzip2", "unpack it, e.g. with bunzip2"),
    b"\xfd7zXZ\0": ("packed with xz", "unpack it, e.g. with unxz"),
    b"PK\3\4": ("a ZIP archive", "unpack it"),
    b"ARROW1": ("an Arrow file", "convert it, e.g. with dataset.to_parquet('a.parquet')"),
    b"SQLite format 3": ("an SQLite database", "export its rows, one JSON object a line"),
    b"<": ("HTML or XML, such as a page that asks to log in", "fetch the data file itself"),
    **dict.fromkeys((b"//", b"/*"), ("JSON with comments", "remove the comments")),
    **dict.fromkeys((b"{'", b"[{'"), ("written by Python's str(), not JSON", "write it again with json.dumps")),
    b"PAR1": ("Parquet", "rename it to end in .parquet"),
    b"version https://git-lfs": ("a pointer of Git LFS", "fetch the file itself, e.g. with git lfs pull"),
    b"/annex/objects": ("a pointer of git-annex", "fetch the file itself, e.g. with git annex get"),
}
OWN_BEGINNING = {TABLE: b"PAR1", ".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd"}

BLANK = object()  # stands for a blank line: it is no row, but it counts as a line
Rows = Iterator[tuple[int, Any]]  # (line within the chunk, from 1; the row's value, None when it is not JSON, or BLANK)


@dataclass(frozen=True)
class Chunk:
    """A part of a file: bytes [start, end) of lines, or row groups of Parquet."""

    file: str
    start: int
    end: int
    size: int  # in bytes, for progress; 0 if not known
    lines: bool = True  # whether a JSON file has a row in each line; else it is one value


def has_ending(file: str, endings: Iterable[str]) -> bool:
    return without_query(file).lower().endswith(tuple(endings))


def cut(file: str, chunk_bytes: int) -> list[Chunk]:
    """Return the chunks of a file, in its order; they depend on the file and `chunk_bytes` alone."""
    return list((_cut_parquet if has_ending(file, [TABLE]) else _cut_json)(file, chunk_bytes))


def chunk_rows(chunk: Chunk, shape: Layout) -> Rows:
    """Yield the rows of a chunk; keeps one row, one batch, or one whole JSON array in memory."""
    return (_parquet_rows if has_ending(chunk.file, [TABLE]) else _json_rows)(chunk, shape)


@contextmanager
def _opened(file: str) -> Iterator[io.BufferedReader]:
    """Open a file, unpacked. Raises InputError if it cannot be read."""
    files, path = fsspec.core.url_to_fs(file)
    packing = next((name for ending, name in PACKINGS.items() if has_ending(file, [ending])), None)
    try:
        with io.BufferedReader(files.open(path, "rb", block_size=BLOCK), BLOCK) as content:
            if packing is None:
                yield content
                return
            import pyarrow

            _require_own_format(file, content)
            with pyarrow.CompressedInputStream(content, packing) as stream:
                yield io.BufferedReader(stream, BLOCK)
    except InputError:
        raise
    # Stores raise the first two if the connection breaks, Parquet the last for dates past 9999.
    except (OSError, ValueError, OverflowError) as error:
        raise _unreadable(file, error) from None


def _require_own_format(file: str, content: io.BufferedReader) -> None:
    """Raise InputError if the first bytes of a packed or Parquet file are those of another format."""
    head = content.peek(HEAD)[:HEAD]
    if any(has_ending(file, [ending]) and head.startswith(begin) for ending, begin in OWN_BEGINNING.items()):
        return
    _require_readable(file, head)
    if head.startswith((b"[", b"{")):
        raise InputError(f"{file} begins with JSON, against its ending; rename it to end in .jsonl")


def _require_readable(file: str, head: bytes) -> None:
    for begin, (what, remedy) in OTHER_FORMATS.items():
        if head.startswith(begin):
            raise InputError(f"{file} is {what}; {remedy}")


# --- JSON -------------------------------------------------------------------------------------------------------------


def _cut_json(file: str, chunk_bytes: int) -> Iterator[Chunk]:
    """Cut lines of JSON; a packed file and one with one JSON value are one chunk."""
    files, path = fsspec.core.url_to_fs(file)
    info = files.info(path)
    size = info["size"]
    with _opened(file) as content:
        lines = _has_lines(file, content)
    # Web servers may give no size, or send whole files only.
    if has_ending(file, PACKINGS) or not lines or size is None or info.get("partial") is False:
        yield Chunk(file, 0, NO_END, size or 0, lines)
        return
    for start in range(0, max(size, 1), chunk_bytes):
        end = min(start + chunk_bytes, size)
        yield Chunk(file, start, end, end - start)


def _json_rows(chunk: Chunk, shape: Layout) -> Rows:
    with _opened(chunk.file) as file:
        yield from _line_rows(chunk, file) if chunk.lines else _value_rows(chunk.file, file, shape)


def _has_lines(file: str, content: io.BufferedReader) -> bool:
    """Tell whether the first two lines that are not blank are rows; else the file has one JSON value, e.g. an array.

    An array in one line is alone in its file; next to others it is a row, a list of turns.
    """
    _require_readable(file, content.peek(HEAD)[:HEAD])
    stripped = (line.removeprefix(codecs.BOM_UTF8).strip() for line in iter(content.readline, b""))
    found = islice(chain(filter(None, stripped), (b"", b"")), 2)
    first, second = (line.decode("utf-8-sig", "replace") for line in found)  # other encodings are named when it is read
    if not first.startswith(("[", "{")):
        return True
    if second and _from_line(first) is not None:
        return True
    return first.startswith("{") and _from_line(second) is not None  # only the first row is broken


def _line_rows(chunk: Chunk, file: io.BufferedReader) -> Rows:
    """Yield the lines that begin in [start, end); the last one may run past the end."""
    position = chunk.start
    if position:
        file.seek(position - 1)
        position += len(file.readline()) - 1
    line = 0
    while position < chunk.end and (text := file.readline()):
        line += 1
        decoded = _decoded(chunk.file, text, position)
        position += len(text)
        yield line, _from_line(decoded) if decoded.strip() else BLANK


def _from_line(text: str) -> Any:
    """Return the value of a line, which ends with a comma in an array without its brackets."""
    value = from_json(text)
    return from_json(text.rstrip()[:-1]) if value is None and text.rstrip().endswith(",") else value


def _decoded(file: str, text: bytes, position: int = 0) -> str:
    try:  # from bytes json.loads would guess UTF-16, and find other lines
        return text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{file} is not UTF-8: its byte {position + error.start:,} is 0x{text[error.start]:02x}, a letter such as "
            f"ä or é in Latin-1 and Windows-1252; convert the file, e.g. with iconv -f WINDOWS-1252 -t UTF-8; if it "
            f"is UTF-8 with a damaged character, remove that with iconv -c -f UTF-8 -t UTF-8"
        ) from None


def _value_rows(file: str, content: io.BufferedReader, shape: Layout) -> Rows:
    """Yield the rows of one JSON value."""
    text = _decoded(file, content.read())
    try:
        value = read_json(text)
    except json.JSONDecodeError as error:
        raise InputError(
            f"{file} starts like one JSON value but is not valid JSON (line {error.lineno}, column {error.colno}: "
            f"{error.msg}); correct it there, or write one object a line, e.g. with jq -c ."
        ) from None
    except RecursionError:
        raise InputError(f"{file} holds JSON that is nested too deeply; write one object a line") from None
    return enumerate(_find_rows(file, value, shape), 1)


def _find_rows(file: str, value: dict | list, shape: Layout) -> list[Any]:
    """Return the rows of an array, of an object around an array, or the one row that the value is."""
    if isinstance(value, list):
        if not shape.is_turns(value):
            return value
        _require_one_conversation(file, value)
        return [value]
    _require_rows(file, value, shape)
    arrays = [key for key, part in value.items() if isinstance(part, list) and _are_rows(key, part, shape)]
    for by_id in (value, *value.values()) if len(value) == 1 else (value,):  # rows by their ids, alone or in an object
        is_of_rows = isinstance(by_id, dict) and by_id and not shape.is_row(by_id)
        if not arrays and is_of_rows and _are_all_rows(list(by_id.values()), shape):
            return [{"id": key, **row} if isinstance(row, dict) else row for key, row in by_id.items()]
    if not arrays:
        return [value]
    own = shape.read(value)
    conversation = own.conversation_column()
    if conversation is not None and plain_name(conversation) not in map(plain_name, arrays):
        is_history = any(kind == "attachments" for _, kind, *_ in shape.wanted_in(arrays[0]))
        are_texts = is_history or _are_texts(value[arrays[0]], shape)
        if own.conversation_kind() == "prompt" and not are_texts and len(arrays) == 1:
            raise InputError(
                f"{file} is one JSON object with a conversation ({conversation}) and an array of rows ({arrays[0]}); "
                f"leave one of them out, e.g. with jq '.{arrays[0]}'"
            )
        return [value]
    if len(arrays) > 1:
        names = ", ".join(arrays[:NAMED_KEYS])
        raise InputError(f"{file} is one JSON object with several arrays of rows ({names}); make a file of each")
    # What stands next to the array, such as a licence, is said of each row.
    others = {key: part for key, part in value.items() if key.lower() != "id" and key not in arrays}
    turns = shape.fields["messages"][0]  # the name of rows that are lists of turns
    return [
        {**others, **(row if isinstance(row, dict) else {turns: row})}
        if isinstance(row, dict) or (others and isinstance(row, list))
        else row
        for row in value[arrays[0]]
    ]


def _are_all_rows(values: list[Any], shape: Layout) -> bool:
    """Tell whether all values are rows of one kind, and not a request and its response; some may be empty, with the
    columns of the first that is not.
    """
    rows = [each for each in values if shape.is_row(each)]
    if not rows or len({shape.read(row).conversation_column() for row in rows}) > 1:
        return False
    columns = {*rows[0]} if isinstance(rows[0], dict) else None
    return all(
        shape.is_row(each) or (columns is not None and isinstance(each, dict) and columns <= each.keys())
        for each in values
    )


def _are_rows(key: str, part: list, shape: Layout) -> bool:
    """Tell whether an array is of rows, by the first element that is a row or a turn: empty rows may come before it."""
    known = (each for each in part if shape.is_turns([each]) or shape.is_row(each))
    first = next(known, None)
    # Where texts are turns without roles.
    if isinstance(first, dict) and (key.lower() in shape.fields["messages"] or plain_name(key) in OF_ONE_TALK):
        return shape.read(first).conversation_kind() in ("messages", "turns")
    return shape.is_row(first)


def _are_texts(part: list, shape: Layout) -> bool:
    """Tell whether an array holds texts alone, such as documents or answers next to a question."""
    return all(shape.read(each).conversation_column() == "text" for each in part if shape.is_row(each))


def _require_one_conversation(file: str, turns: list[dict]) -> None:
    for name in dict.fromkeys(key for turn in turns for key in turn if plain_name(key) in TURN_OF):
        if len(found := {json.dumps(turn.get(name)) for turn in turns}) > 1:
            raise InputError(
                f"{file} is one array with the turns of {len(found)} conversations, by their {name}; "
                f"write the turns of each as an array of its own"
            )


def _require_rows(file: str, value: dict, shape: Layout) -> None:
    """Raise InputError for a table that is stored by columns: each a list of values, or an object of them by row."""
    if all(isinstance(value.get(key), list) for key in ("columns", "data")) and len(value) <= SPLIT_KEYS:
        raise InputError(
            f"{file} is a table of pandas with its columns apart (orient='split'); write one object a line, e.g. with "
            f"pandas.read_json(FILE, orient='split').to_json('rows.jsonl', orient='records', lines=True)"
        )
    columns = shape.read(value)
    kind = columns.conversation_kind()
    if kind not in ("prompt", "messages") or not all(isinstance(each, list | dict) for each in value.values()):
        return
    cells = columns.first(kind)
    cells = list(cells.values()) if isinstance(cells, dict) else cells
    rows = [list(each) if isinstance(each, dict) else len(each) for each in value.values()]
    # An array of conversations alone is an object around its rows.
    is_list = isinstance(cells, list)  # else it is a text of a request, say
    are_cells = (all(map(shape.is_turns, cells)) and len(rows) > 1) or all(isinstance(cell, str) for cell in cells)
    if is_list and are_cells and rows[0] != 1 and all(each == rows[0] for each in rows):
        raise InputError(
            f"{file} is stored by columns ({', '.join([*value][:NAMED_KEYS])}), not by rows; write one object a line, "
            f"e.g. with pandas.read_json(FILE).to_json('rows.jsonl', orient='records', lines=True)"
        )


# --- Parquet ----------------------------------------------------------------------------------------------------------


@contextmanager
def _table(file: str) -> Iterator[Any]:
    """Open a Parquet file. Raises InputError if it is damaged."""
    import pyarrow.parquet

    try:
        with _opened(file) as content:
            _require_own_format(file, content)
            with pyarrow.parquet.ParquetFile(content) as table:
                yield table
    except pyarrow.ArrowException as error:
        raise _unreadable(file, error) from None


def _cut_parquet(file: str, chunk_bytes: int) -> Iterator[Chunk]:
    """Yield runs of row groups that together have about `chunk_bytes`."""
    with _table(file) as table:
        sizes = [table.metadata.row_group(group).total_byte_size for group in range(table.num_row_groups)]
    start = total = 0
    for number, size in enumerate(sizes, 1):
        total += size
        if total >= chunk_bytes or number == len(sizes):
            yield Chunk(file, start, number, total)
            start, total = number, 0


def _parquet_rows(chunk: Chunk, shape: Layout) -> Rows:
    with _table(chunk.file) as table:
        schema = table.schema_arrow
        columns = [
            each.name
            for each in schema
            if any(shape.wanted_in(each.name)) or names_media(each.name) or _may_name_file(each.type)
        ]
        if twice := [name for name in columns if columns.count(name) > 1]:
            raise InputError(
                f"{chunk.file} has several columns of the name {twice[0]}; leave one of them, or rename it"
            )
        unread = dict.fromkeys((name for name in schema.names if name not in columns), UNREAD)
        groups = list(range(chunk.start, chunk.end))
        batches = table.iter_batches(batch_size=1024, row_groups=groups, columns=columns, use_threads=False)
        as_bytes = [name for name in columns if _is_binary(schema.field(name).type)]
        maps = "lossy" if any("map<" in str(schema.field(name).type) for name in columns) else None  # it takes time
        rows = (row | unread for batch in batches for row in batch.to_pylist(maps_as_pydicts=maps))
        if as_bytes:
            rows = (row | {name: _decode_if_text(row[name]) for name in as_bytes} for row in rows)
        yield from enumerate(rows, 1)


def _is_binary(type: Any) -> bool:
    from pyarrow import types

    return types.is_binary(type) or types.is_large_binary(type)


def _decode_if_text(value: bytes | None) -> bytes | str | None:
    """Return a text that Spark, Hive or another program stored as bytes; other values as they are."""
    try:
        return value.decode() if value is not None else None
    except UnicodeDecodeError:
        return value


def _may_name_file(type: Any) -> bool:
    """Tell whether a column may hold files or their names. Others, such as numbers, are not read."""
    from pyarrow import types

    if types.is_list(type) or types.is_large_list(type):
        return _may_name_file(type.value_type)
    if types.is_struct(type):
        return any(type.field(index).name in FILE_PARTS for index in range(type.num_fields))
    kinds = (types.is_string, types.is_large_string, types.is_dictionary, _is_binary, types.is_null)
    return any(is_kind(type) for is_kind in kinds)


def _unreadable(file: str, error: Exception) -> InputError:
    return InputError(
        f"{file} is damaged, not what its ending says, or cannot be read ({type(error).__name__}); "
        f"fetch or write it again"
    )
