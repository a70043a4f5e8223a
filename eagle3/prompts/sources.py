"""Where conversations come from: JSON Lines, Parquet, dataset folders. Local files only, read row by row."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from eagle3.errors import InputError
from eagle3.prompts.conversation import SHAPES
from eagle3.storage import sha256_json

ID_COLUMNS = ("id", "conversation_id", "question_id")
LICENSE_COLUMNS = ("license", "licence")
COLUMNS = (*ID_COLUMNS, *LICENSE_COLUMNS, "source", *SHAPES)


@dataclass(frozen=True, kw_only=True)
class Source:
    key: str  # the config key that names it, for messages
    path: Path
    files: list[Path]
    name: str
    license: str | None
    limit: int | None  # prompts kept
    id_prefix: str

    def fingerprint(self) -> str:
        """Changes when a file is added, removed, resized or touched."""
        states = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in self.files]
        return sha256_json(states)


class Row(NamedTuple):
    file: str
    line: int  # from 1; a row number where the format has no lines
    value: dict | None  # None: not a JSON object


def configured_sources(
    *, path: str | None, license: str | None, name: str | None, split: str, sources: list[dict] | None
) -> list[Source]:
    """The sources of a `prompts` config, each checked to exist: `path` alone, or the list `sources`."""
    if (path is None) == (sources is None):
        raise InputError(
            f"prompts.path={path} and prompts.sources={sources}: set exactly one of them, e.g. prompts.path=chats.jsonl"
        )
    defaults = {"path": path, "license": license, "name": name, "split": split, "limit": None}
    if sources is None:
        return [_source("prompts", defaults, id_prefix=False)]
    found = [
        _source(f"prompts.sources[{index}]", _entry(index, entry, defaults), id_prefix=True)
        for index, entry in enumerate(sources)
    ]
    for index, source in enumerate(found):
        if source.name in [earlier.name for earlier in found[:index]]:
            raise InputError(f"{source.key}.name={source.name} is taken by an earlier source; give it another name")
    return found


def _entry(index: int, entry: dict, defaults: dict) -> dict:
    unknown = set(entry) - set(defaults)
    if unknown:
        raise InputError(f"prompts.sources[{index}].{min(unknown)} is no key of a source; keys: {', '.join(defaults)}")
    return {**defaults, **entry}


def _source(key: str, entry: dict, *, id_prefix: bool) -> Source:
    if entry["path"] is None:
        raise InputError(f"{key}.path is not set; name a JSONL or Parquet file or a dataset folder")
    check_limit(key, entry["limit"])
    path = Path(entry["path"]).expanduser()
    files = _files(f"{key}.path={path}", path, f"{key}.split", entry["split"])
    name = entry["name"] or (path.stem if path.is_file() else path.resolve().name)
    return Source(
        key=key,
        path=path,
        files=files,
        name=name,
        license=entry["license"],
        limit=entry["limit"],
        id_prefix=f"{name}/" if id_prefix else "",
    )


def check_limit(key: str, limit: int | None) -> None:
    if limit is not None and limit < 1:
        raise InputError(f"{key}.limit={limit} keeps no prompt; give 1 or more, or null for all")


def _files(setting: str, path: Path, split_key: str, split: str) -> list[Path]:
    if not path.exists():
        raise InputError(f"{setting} does not exist; name a JSONL or Parquet file or a dataset folder")
    files = [path]
    if path.is_dir():
        splits = _dataset_splits(setting, path)
        if split not in splits:
            raise InputError(f"{split_key}={split} is not in {path}; it has: {', '.join(splits)}")
        files = splits[split]
    for file in files:
        if file.suffix not in READERS:
            raise InputError(f"{setting}: {file.name} ends in none of {', '.join(READERS)}; convert or unpack it")
    return files


def _dataset_splits(setting: str, folder: Path) -> dict[str, list[Path]]:
    """Split name → data files, by the rules of `datasets` (file names, folder names, the card's list of files)."""
    import datasets

    try:
        if (folder / "state.json").exists() or (folder / "dataset_dict.json").exists():
            saved = datasets.load_from_disk(folder)
            splits = saved if isinstance(saved, dict) else {"train": saved}
            return {str(name): [Path(file["filename"]) for file in part.cache_files] for name, part in splits.items()}
        with TemporaryDirectory() as cache:
            found = datasets.load_dataset_builder(str(folder.resolve()), cache_dir=cache).config.data_files
    except (FileNotFoundError, ValueError) as error:
        raise InputError(
            f"{setting} is no dataset folder that can be read ({' '.join(str(error).split())[:200]}); "
            f"name one data file or the subfolder that holds them"
        ) from None
    return {str(name): [Path(file) for file in files] for name, files in found.items()}


def read_rows(source: Source) -> Iterator[Row]:
    """All rows of a source in file order; memory holds one row, one Parquet batch, or one whole JSON array."""
    for file in source.files:
        for line, value in READERS[file.suffix](file):
            yield Row(file.name, line, value if isinstance(value, dict) else None)


def _json_rows(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as file:
        if path.suffix == ".json" and file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
            yield from enumerate(_json_array(path), 1)
            return
        file.seek(0)
        for line, text in enumerate(file, 1):
            if text.strip():
                yield line, _json(text)


def _json(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        return None


def _json_array(path: Path) -> list:
    rows = _json(path.read_bytes())
    if rows is None:
        raise InputError(f"{path} starts like a JSON array but is not valid JSON; mend it or write one object a line")
    return rows


def _parquet_rows(path: Path) -> Iterator[tuple[int, dict]]:
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns = [name for name in file.schema_arrow.names if name in COLUMNS]
            batches = file.iter_batches(batch_size=1024, columns=columns)
            yield from enumerate((row for batch in batches for row in batch.to_pylist()), 1)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from None


def _arrow_rows(path: Path) -> Iterator[tuple[int, dict]]:
    import pyarrow

    try:
        with pyarrow.memory_map(str(path)) as file, pyarrow.ipc.open_stream(file) as batches:
            columns = [name for name in batches.schema.names if name in COLUMNS]
            yield from enumerate((row for batch in batches for row in batch.select(columns).to_pylist()), 1)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> InputError:
    return InputError(
        f"{path} is damaged or not what its ending says ({type(error).__name__}); fetch or write it again"
    )


READERS = {
    ".jsonl": _json_rows,
    ".ndjson": _json_rows,
    ".json": _json_rows,
    ".parquet": _parquet_rows,
    ".arrow": _arrow_rows,
}
