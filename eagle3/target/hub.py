"""A target of the Hugging Face hub: its files in the cache of this machine, all of one commit."""

import errno
import logging
import os
import re
from functools import cache
from pathlib import Path
from typing import ClassVar
from weakref import WeakSet

from huggingface_hub import HfApi, constants, is_offline_mode, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from eagle3.errors import InputError, first_line
from eagle3.progress import Bar

log = logging.getLogger(__name__)
COMMIT = re.compile(r"[0-9a-f]{40}")
# Config, tokenizer, chat templates, code that comes with the model, and its card.
TEXTS = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "*.py", "README.md")
ELSEWHERE = ("original/*", "checkpoint-*/*", "onnx/*")  # the same model in other formats or states
DENIED = 401, 403
ONCE_ONLINE = "run the command once where there is a network, or give the model's folder: target.path=FOLDER"


class WeightsBar(Bar):
    """The library does not close its bars."""

    made: ClassVar["WeakSet[Bar]"] = WeakSet()


class NoBar(Bar):
    """For files that take no time."""

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options | {"disable": True})


@cache
def fetch_texts(path: str, revision: str | None) -> Path:
    """Return the folder that has a model's files, except its weights; it has the name of their commit. Called again, it
    is the same one, so that all that a process reads is of one commit."""
    if not (revision and COMMIT.fullmatch(revision)):
        _require_hub_or_cache(path, revision)
    return _fetch(path, revision, TEXTS, NoBar)


def _require_hub_or_cache(path: str, revision: str | None) -> None:
    """Ask the hub for the model once; where it does not answer, use only the cache or raise InputError."""
    try:
        HfApi().model_info(path, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception as error:  # of the library's HTTP client, too, which changes with its version
        _refuse(path, revision, error)
        host, folder, reason = constants.ENDPOINT, constants.HF_HUB_CACHE, _reason(error)
        if not isinstance(try_to_load_from_cache(path, "config.json", revision=revision), str):
            remedy = "try again later"
            if not isinstance(error, HfHubHTTPError):
                remedy = (
                    f"where there is a network run: hf download {path} --local-dir FOLDER, copy the folder and give "
                    f"it: target.path=FOLDER"
                )
            raise InputError(
                f"target.path={path} is no folder, not in the cache {folder} (revision {revision or 'main'}), and "
                f"{host} cannot be reached ({reason}); {remedy}"
            ) from None
        if not is_offline_mode():
            log.warning("%s cannot be reached (%s): %s is read from the cache %s", host, reason, path, folder)
        constants.HF_HUB_OFFLINE = True
        os.environ["HF_HUB_OFFLINE"] = "1"  # of servers and workers that this process starts


def fetch_weights(path: str, commit: str, folder: Path, names: list[str]) -> None:
    """Add these files of weights to the folder, and no other ones: repositories also have them in other formats."""
    missing = [name for name in names if not (folder / name).exists()]
    if not missing:
        return
    if is_offline_mode():  # older releases of the library then return the folder as it is
        raise InputError(
            f"target.path={path} cannot be fetched from the hub ({missing[0]} is not in the cache "
            f"{constants.HF_HUB_CACHE}); {ONCE_ONLINE}"
        )
    log.info("fetching the weights of %s into the cache %s", path, constants.HF_HUB_CACHE)
    try:
        _fetch(path, commit, names, WeightsBar)
    finally:
        for bar in [*WeightsBar.made]:
            bar.close()


def _fetch(path: str, revision: str | None, names: tuple[str, ...] | list[str], bar: type[Bar]) -> Path:
    try:
        folder = snapshot_download(
            path, revision=revision, allow_patterns=[*names], ignore_patterns=[*ELSEWHERE], tqdm_class=bar
        )
    except Exception as error:  # of the library's HTTP client, too
        _refuse(path, revision, error)
        cache_keys = f"{constants.HF_HUB_CACHE}: set HF_HUB_CACHE to a folder"
        remedy = "run the same command again, which continues with what is there"
        if isinstance(error, LocalEntryNotFoundError):
            remedy = ONCE_ONLINE
        elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = f"no space is left in the cache {cache_keys} on a larger disk"
        elif isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            remedy = f"the cache cannot be written, {cache_keys} that can be"
        raise InputError(f"target.path={path} cannot be fetched from the hub ({_reason(error)}); {remedy}") from error
    return Path(folder)


def _refuse(path: str, revision: str | None, error: Exception) -> None:
    """Raise InputError where the hub answers that it does not give this model."""
    page = f"{constants.ENDPOINT}/{path}"
    access = "give the token of an account with access: set HF_TOKEN, or run: hf auth login"
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    if isinstance(error, RevisionNotFoundError):
        rule = f"target.revision={revision} is no branch, tag or commit of target.path={path}; choose one of {page}"
    elif isinstance(error, GatedRepoError):
        rule = f"target.path={path} is gated: accept its terms at {page}, and {access}"
    elif isinstance(error, RepositoryNotFoundError):
        rule = f"target.path={path} is no folder here and no model at {page}; correct it or, if it is private, {access}"
    elif status in DENIED:
        rule = f"target.path={path} was refused by the hub ({_reason(error)}); {access}"
    else:
        return
    raise InputError(rule) from error


def _reason(error: Exception) -> str:
    """Return what went wrong, without the lines around it."""
    return first_line(error.__cause__ if isinstance(error, LocalEntryNotFoundError) and error.__cause__ else error)
