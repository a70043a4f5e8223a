"""Which data files a dataset folder holds: split name → files, by the rules of Hugging Face `datasets`."""

import json
from tempfile import TemporaryDirectory
from typing import Any

import fsspec

from eagle3.errors import InputError

SAVED = "state.json"  # written by Dataset.save_to_disk
SAVED_SPLITS = "dataset_dict.json"  # written by DatasetDict.save_to_disk


def dataset_splits(setting: str, folder: str) -> dict[str, list[str]]:
    """Files of each split, from what save_to_disk wrote, or else by file names, folder names and the card.

    Raises InputError that begins with `setting` when the folder is none that `datasets` can read.
    """
    files, path = fsspec.core.url_to_fs(folder)
    if files.exists(f"{path}/{SAVED_SPLITS}"):
        splits = json.loads(files.cat_file(f"{path}/{SAVED_SPLITS}"))["splits"]
        return {str(split): _saved_files(files, f"{path}/{split}") for split in splits}
    if files.exists(f"{path}/{SAVED}"):
        return {"train": _saved_files(files, path)}
    try:
        return _found_files(folder, remote="file" not in _protocols(files))
    except (FileNotFoundError, ValueError) as error:
        raise InputError(
            f"{setting} is no dataset folder that can be read ({' '.join(str(error).split())[:200]}); "
            f"name one data file or the subfolder that holds them"
        ) from None


def _protocols(files: Any) -> tuple[str, ...]:
    return (files.protocol,) if isinstance(files.protocol, str) else tuple(files.protocol)


def _saved_files(files: Any, folder: str) -> list[str]:
    state = json.loads(files.cat_file(f"{folder}/{SAVED}"))
    return [files.unstrip_protocol(f"{folder}/{entry['filename']}") for entry in state["_data_files"]]


def _found_files(folder: str, *, remote: bool) -> dict[str, list[str]]:
    import datasets

    if remote:  # the builder reads local folders only; without it a card's own list of files is not asked
        from datasets.data_files import DataFilesDict, get_data_patterns

        found = DataFilesDict.from_patterns(get_data_patterns(folder), base_path=folder)
    else:
        with TemporaryDirectory() as cache:
            found = datasets.load_dataset_builder(folder, cache_dir=cache).config.data_files
    return {str(split): [str(file) for file in files] for split, files in found.items()}
