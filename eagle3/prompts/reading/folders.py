"""The data files of a dataset folder: split name → files, by the rules of Hugging Face `datasets`."""

import logging
from tempfile import TemporaryDirectory
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from eagle3.errors import InputError, require_packages
from eagle3.prompts.reading.formats import FORMATS

log = logging.getLogger(__name__)

DATA = (*FORMATS, ".arrow", ".csv", ".tsv", ".gz", ".zst")  # endings of files of rows
NAMED_FILES = 5  # in a warning


def dataset_splits(setting: str, folder: str) -> dict[str, list[str]]:
    """Return the files of each split, by file names, folder names and the card.

    Raises InputError, starting with `setting`, if `datasets` cannot read the folder.
    """
    files, path = fsspec.core.url_to_fs(folder)
    require_packages("datasets", extra="prompts", needed_by=f"{setting}, a dataset folder,")
    try:
        splits = _found_files(folder, remote=not isinstance(files, LocalFileSystem))
    except (FileNotFoundError, ValueError) as error:
        raise InputError(
            f"{setting} is not a dataset folder that can be read ({' '.join(str(error).split())[:200]}); "
            f"name one data file or the subfolder that holds them"
        ) from None
    _warn_of_the_rest(setting, _left_out(files, path, splits))
    return splits


def _found_files(folder: str, *, remote: bool) -> dict[str, list[str]]:
    import datasets

    if remote:  # the builder reads local folders only; this way ignores a list of files in the card
        from datasets.data_files import DataFilesDict, get_data_patterns

        found = DataFilesDict.from_patterns(get_data_patterns(folder), base_path=folder)
    else:
        with TemporaryDirectory() as cache:
            found = datasets.load_dataset_builder(folder, cache_dir=cache).config.data_files
    return {str(split): [str(file) for file in files] for split, files in found.items()}


def _left_out(files: Any, folder: str, splits: dict[str, list[str]]) -> list[str]:
    """Return the paths, inside the folder, of data files that `datasets` put into no split."""
    from datasets.data_files import FILES_TO_IGNORE

    folder = folder.rstrip("/")
    inside = [file[len(folder) + 1 :] for file in files.find(folder) if file.startswith(f"{folder}/")]
    data = [
        name
        for name in inside
        if name.lower().endswith(DATA)
        and name.rpartition("/")[2] not in FILES_TO_IGNORE
        and not any(part.startswith((".", "__")) for part in name.split("/"))
    ]
    # Compares the ends of paths: some stores put a revision into the paths of the splits' files.
    lengths = {name.count("/") + 1 for name in data}
    read = {"/".join(file.split("/")[-length:]) for split in splits.values() for file in split for length in lengths}
    return [name for name in data if name not in read]


def _warn_of_the_rest(setting: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - NAMED_FILES} more" if len(names) > NAMED_FILES else ""
        log.warning(
            "%s: %d data files of this folder are NOT read, because `datasets` takes one format, and by their names or "
            "the card no split has them: %s%s; name them as sources of their own in prompts.sources",
            setting, len(names), ", ".join(names[:NAMED_FILES]), more,
        )  # fmt: skip
