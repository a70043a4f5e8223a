"""The sources of conversations: the `prompts` config → sources with their files, which must exist."""

import glob
import logging
import os
import re
from dataclasses import dataclass
from itertools import chain
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from eagle3.errors import InputError, require_packages
from eagle3.prompts.licenses.terms import SourceTerms, nearest_card, read_card, source_terms
from eagle3.prompts.reading.formats import FORMATS, PLAIN, has_ending
from eagle3.prompts.reading.shapes import Layout, build_layout
from eagle3.secrets import without_query
from eagle3.settings.prompts import PromptSettings

log = logging.getLogger(__name__)
# Keys of a store's file info that change with the content; a store has one or a few of them.
VERSION_KEYS = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "Last-Modified", "last_modified", "updated")
# Endings of files of rows; those of a shard may come after it: a.jsonl-00000-of-00002.
DATA = re.compile(
    r"\.(jsonl|ndjson|json|parquet|arrow|feather|orc|avro|csv|tsv|xlsx|log|tar|tgz|gz|zst|bz2|xz|lz4|zip|7z)"
    r"(-\d+-of-\d+)?$",
    re.IGNORECASE,
)
HUB_CACHE = re.compile(r"/datasets--[^/]+(/snapshots)?/?$")  # its folder of a data set, above those of the revisions
CARDS = ("README.md", ".huggingface.yaml", "dataset_infos.json")  # tell `datasets` which files are of which split
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")  # also in testData
HELD_BACK = {"test", "tests", "testing", "eval", "evaluation", "dev", "val", "valid", "validation"}
HELD_BACK |= {"holdout", "heldout", "benchmark"}
CONVERTED = re.compile(r"([^/]+)/[^/]+/\d{4}\.parquet")  # config/split/0000.parquet, as the Hub converts data sets
NAMED_FILES = 5  # in a warning


@dataclass(frozen=True, kw_only=True)
class Source:
    key: str  # the config key of this source, for messages
    path: str  # a local path or an fsspec URL
    files: list[str]
    name: str
    terms: SourceTerms
    limit: int | None  # prompts kept
    id_prefix: str
    shape: Layout
    written_by: dict[str, Any] | None = None  # the target and how it was sampled, of prompts that it wrote itself

    def fingerprint(self) -> list[list[Any]]:
        """Return the state of all files: it changes if a file is added, removed, resized or rewritten."""
        return [file_state(file) for file in self.files]

    def inputs(self) -> dict[str, Any]:
        """Return everything that the prompts of this source depend on, except the files."""
        return {
            "path": without_query(self.path),
            "name": self.name,
            "license": self.terms.license,
            "known_as": list(self.terms.known_as),
            "id_prefix": self.id_prefix,
            "fields": {kind: list(names) for kind, names in self.shape.fields.items()},
            "roles": dict(self.shape.roles),
            "keeps_tools": self.shape.keeps_tools,
            **({"written_by": self.written_by} if self.written_by else {}),
        }


def configured_sources(settings: PromptSettings) -> list[Source]:
    """Return the sources of a `prompts` config, each checked to exist: `path` alone, or the list `sources`."""
    path, sources = settings.path, settings.sources
    if (path is None) == (sources is None):
        raise InputError(
            f"prompts.path={path} and prompts.sources={sources}: set exactly one of them, e.g. prompts.path=chats.jsonl"
        )
    defaults = vars(settings) | {"limit": None}  # prompts.limit is for all sources together
    if sources is None:
        return [source_at("prompts", defaults)]
    found = [
        source_at(f"prompts.sources[{index}]", defaults | _entry(entry), id_prefix=True)
        for index, entry in enumerate(sources)
    ]
    require_unique_names(found)
    return found


def require_unique_names(sources: list[Source]) -> None:
    for index, source in enumerate(sources):
        if source.name in [earlier.name for earlier in sources[:index]]:
            raise InputError(f"{source.key}.name={source.name} is taken by an earlier one; give it another name")


def _entry(entry: str | dict) -> dict:
    return entry if isinstance(entry, dict) else {"path": entry}


def source_at(
    key: str, entry: str | dict, *, split: str = "train", id_prefix: bool = False, keeps_history: bool = False
) -> Source:
    """Return the source that `entry`, a path or an element of prompts.sources, describes.

    split: the default for a dataset folder; id_prefix: whether ids begin with its name; keeps_history: see Layout.
    """
    entry = _entry(entry)
    path = str(entry["path"]).removeprefix("file://")
    if "://" not in path:  # keeps symbolic links: in the Hub's cache only the link has the file's name
        path = os.path.abspath(path)
    files = _files(key, entry, path, split)
    name = entry.get("name") or _stem(path, is_file=files == [path])
    terms = source_terms(name=name, path=path, license=entry.get("license"), attribution=entry.get("attribution"))
    return Source(
        key=key,
        path=path,
        files=files,
        name=name,
        terms=terms,
        limit=entry.get("limit"),
        id_prefix=f"{name}/" if id_prefix else "",
        shape=build_layout(
            entry.get("fields"),
            entry.get("roles"),
            keeps_tools=entry.get("tools") == "keep",
            keeps_history=keeps_history,
        ),
    )


def file_name(file: str) -> str:
    return without_query(file).rpartition("/")[2]


def _stem(path: str, *, is_file: bool) -> str:
    name = file_name(path.rstrip("/"))
    return next((name[: -len(end)] for end in FORMATS if is_file and name.lower().endswith(end)), name)


def _files(key: str, entry: dict, path: str, usual_split: str) -> list[str]:
    setting, split_key, split = f"{key}.path={entry['path']}", f"{key}.split", entry.get("split")
    if _is_file(setting, path):
        for name in ("config", "split"):
            if entry.get(name) is not None:
                log.warning(
                    "%s.%s=%s has no effect on %s, a file, which is read whole; leave it out",
                    key, name, entry[name], setting,
                )  # fmt: skip
        files = [path]
    else:
        splits, wanted = _dataset_splits(setting, path, f"{key}.config", entry.get("config")), split or usual_split
        if wanted not in splits:
            raise InputError(f"{split_key}={wanted} is not in {path}; it has: {', '.join(splits)}")
        files = splits.pop(wanted)
        if split is None and splits:
            others = "; ".join(f"{name}: {_named([*map(file_name, each)])}" for name, each in splits.items())
            log.warning(
                "%s: of this folder only the split %s is read, NOT %s. `datasets` finds splits by words in the names "
                "of files, such as test, eval or dev; %s=... chooses a split, prompts.sources names several files",
                setting, wanted, others, split_key,
            )  # fmt: skip
        if split is None and usual_split == "train":
            _warn_of_mixture(setting, [_inside(path, file) for file in files], split_key)
    for file in files:
        if not has_ending(file, FORMATS):
            raise InputError(
                f"{setting}: {file_name(file)} ends in none of {', '.join(FORMATS)}; take it out of "
                f"the folder, or rename, convert or unpack it, "
                f"a CSV file with pandas.read_csv('a.csv').to_parquet('a.parquet'), "
                f"an Arrow file with dataset.to_parquet('a.parquet')"
            )
        if not has_ending(file, PLAIN):
            require_packages("pyarrow", extra="prompts", needed_by=f"{setting}, read as Parquet, .gz or .zst,")
    return files


def _warn_of_mixture(setting: str, files: list[str], split_key: str) -> None:
    """Warn if files that are read may be for tests or have the rows of others: `datasets` knows few names of splits."""
    if tests := [file for file in files if HELD_BACK.intersection(map(str.lower, WORD.findall(file)))]:
        log.warning(
            "%s: by their names, %d of the files that are read may be for tests: %s; if they are, take them out of the "
            "folder, or name the others in prompts.sources; if not, %s=train says so",
            setting, len(tests), _named(tests), split_key,
        )  # fmt: skip
    configs = sorted({found[1] for file in files if (found := CONVERTED.fullmatch(file))})
    if len(configs) > 1:
        log.warning(
            "%s: %d configurations of a data set are read together: %s; to read one, name its folder",
            setting, len(configs), _named(configs),
        )  # fmt: skip
    by_ending: dict[str | None, list[str]] = {}
    for file in files:
        by_ending.setdefault(next((end for end in FORMATS if has_ending(file, [end])), None), []).append(file)
    if len(by_ending) > 1:
        log.warning(
            "%s: files of several kinds are read: %s; if some have the rows of others, or none, take them out of the "
            "folder, or name the others in prompts.sources; if not, %s=train says so",
            setting, " | ".join(map(_named, by_ending.values())), split_key,
        )  # fmt: skip


def _is_file(setting: str, path: str) -> bool:
    """Tell a file from a folder. Raises InputError if there is neither, or if the store does not answer."""
    try:
        files, inner = fsspec.core.url_to_fs(path)
        if files.isfile(inner):
            return True
        if files.exists(inner):
            return False
    except Exception as error:  # a missing package, or what the store's client raises, e.g. without credentials
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"{setting} cannot be opened ({type(error).__name__}: {reason}); fix that or the address"
        ) from None
    raise InputError(f"{setting} does not exist; name a JSONL or Parquet file or a dataset folder")


def _dataset_splits(setting: str, folder: str, config_key: str, config: str | None) -> dict[str, list[str]]:
    """Return the files of each split, by the rules of Hugging Face `datasets`; warn of data files in no split.

    Raises InputError, starting with `setting`, if `datasets` cannot read the folder.
    """
    files, path = fsspec.core.url_to_fs(folder)
    require_packages("datasets", extra="prompts", needed_by=f"{setting}, a dataset folder,")
    if HUB_CACHE.search(folder):
        raise InputError(
            f"{setting} is the Hub's cache of all revisions of a data set; name one, e.g. "
            f"{folder.rstrip('/').removesuffix('/snapshots')}/snapshots/REVISION, with a name from that folder"
        )
    if not read_card(folder)[0] and nearest_card(folder)[0].get("configs"):
        log.warning(
            "%s is inside a data set whose card sorts its files into configs and splits; here they are sorted by their "
            "names only, and another split may be read: better name the data set's folder, and %s if it has several",
            setting, config_key,
        )  # fmt: skip
    if isinstance(files, LocalFileSystem) and (unreached := _unreached(folder)):
        log.warning(
            "%s: links to folders or to missing files, and folders without the right to read them, are NOT read: %s; "
            "fetch the files, name them as sources of their own in prompts.sources, or make them readable",
            setting, _named(unreached),
        )  # fmt: skip
    try:
        root = files.info(path)["name"].rstrip("/")  # a store may give another name to the folder
        found = [name[len(root) + 1 :] for name in files.find(path) if name.startswith(f"{root}/")]
        folders = {str(parent) for name in found for parent in PurePosixPath(name).parents}
        marks = {"", *folders}  # stores may have an empty file for a folder
        inside = [name for name in found if name.rstrip("/") not in marks]
        splits = _found_files(folder, files, root, inside, config)
    except Exception as error:  # besides errors of `datasets` and the store, those of YAML in a card
        reason = " ".join(str(error).split())[:200]
        # A subfolder would be read without the card, which may call some of its files a test split.
        is_choice = reason.startswith(("Config name", "BuilderConfig"))
        remedy = (
            f"choose one with {config_key}=..." if is_choice else "name one data file or the subfolder with the data"
        )
        raise InputError(f"{setting} is not a dataset folder that can be read ({reason}); {remedy}") from None
    if left_out := _left_out(folder, inside, splits):
        log.warning(
            "%s: %d data files of this folder are NOT read, because `datasets` takes one format, and by their names or "
            "the card no split has them: %s; name them as sources of their own in prompts.sources",
            setting, len(left_out), _named(left_out),
        )  # fmt: skip
    return splits


def _named(files: list[str]) -> str:
    """Return the names of the first files, and how many more there are."""
    more = f" and {len(files) - NAMED_FILES} more" if len(files) > NAMED_FILES else ""
    return f"{', '.join(files[:NAMED_FILES])}{more}"


def _found_files(folder: str, files: Any, root: str, inside: list[str], config: str | None) -> dict[str, list[str]]:
    import datasets

    place = folder
    with TemporaryDirectory() as cache:
        # The builder reads local folders only, and would take this name for a pattern.
        if not isinstance(files, LocalFileSystem) or glob.has_magic(folder):
            place = _same_names(files, root, inside, Path(cache).resolve() / "data")
        found = datasets.load_dataset_builder(place, config, cache_dir=cache).config.data_files
    return {str(split): [_moved(str(file), place, folder) for file in each] for split, each in found.items()}


def _unreached(folder: str) -> list[str]:
    """Return the paths, inside a local folder, that `datasets` leaves out: links to folders or to nothing, and folders
    that this user may not read."""
    refused: list[OSError] = []
    found = [Path(inside, name) for inside, *names in os.walk(folder, onerror=refused.append) for name in chain(*names)]
    links = [each for each in found if each.is_symlink() and not each.is_file()]
    paths = [os.path.relpath(each, folder) for each in (*links, *(error.filename for error in refused))]
    return sorted(path for path in paths if path == "." or not _is_hidden(path))


def _same_names(files: Any, root: str, inside: list[str], place: Path) -> str:
    """Make a folder `place` with empty files of the same names, and the files that tell which are of which split."""
    place.mkdir()
    for name in inside:
        file = place / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(files.cat_file(f"{root}/{name}") if name in CARDS else b"")
    return str(place)


def _moved(file: str, place: str, folder: str) -> str:
    place = os.path.realpath(place)  # as `datasets` names it
    return f"{folder.rstrip('/')}{file[len(place) :]}" if file.startswith(f"{place}/") else file


def _left_out(folder: str, inside: list[str], splits: dict[str, list[str]]) -> list[str]:
    """Return the paths, inside the folder, of data files that `datasets` put into no split."""
    from datasets.data_files import FILES_TO_IGNORE

    data = [
        name
        for name in inside
        if DATA.search(name) and name.rpartition("/")[2] not in FILES_TO_IGNORE and not _is_hidden(name)
    ]
    read = {_inside(folder, file) for split in splits.values() for file in split}
    return [name for name in data if name not in read]


def _inside(folder: str, file: str) -> str:
    return file.removeprefix(f"{folder.rstrip('/')}/")


def _is_hidden(name: str) -> bool:
    return any(part.startswith((".", "__")) for part in name.split("/"))


def file_state(file: str) -> list[Any]:
    """Return the file's name, size and version, as far as its store reports them."""
    files, path = fsspec.core.url_to_fs(file)
    info = files.info(path)
    version = next((str(info[key]) for key in VERSION_KEYS if info.get(key) is not None), None)
    return [without_query(file), info["size"], version]
