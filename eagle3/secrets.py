"""Hides secrets: the one place that logs, files, W&B and errors go through.

Secret are all values of `launch.env`, values of keys like `api-key`, passwords and signatures in URLs, and the values
of those environment variables whose names say so. They are best given in the environment: no key of the config asks for
one.
"""

import logging
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from omegaconf import DictConfig, OmegaConf

HIDDEN = "***"
SHORTEST = 8  # characters of a value that is looked for wherever it may stand: "1" stands everywhere
SAYS_SECRET = re.compile(r"token(?!iz)|secret|passw|credential|(api|access|private)_?key|signature", re.IGNORECASE)
KEY = re.compile(r"(api|access|private)[-_]?key$|passw|secret$|credential|(^|[-_])token$", re.IGNORECASE)  # of a config
ACTIONS = ("drop", "mask", "keep")  # of prompts.privacy.actions, whose keys are such as PASSWORD
PASSWORD = re.compile(r"(://[^/@\s:]*):([^/@\s]+)@")
SIGNATURE = re.compile(
    r"([?&][^=&\s]*(?:signature|token|secret|passw|credential|key|sig|policy)[^=&\s]*=)([^&\s'\",\]}]+)", re.IGNORECASE
)
ENVIRONMENT = re.compile(r"(launch\.env[\w.]*=)(\{[^}]*\}|[^,\s]*)")  # as an override
_known: set[str] = set()


def public(value: Any) -> Any:
    """Return `value` with what is secret in it hidden: a text, or plain values with texts in them."""
    if isinstance(value, str):
        return _public_text(value)
    if isinstance(value, Mapping):
        return {public(key): _of_key(str(key), part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [public(part) for part in value]
    return value


def _of_key(key: str, value: Any) -> Any:
    if key == "env" and isinstance(value, Mapping):
        return dict.fromkeys(value, HIDDEN)
    return HIDDEN if isinstance(value, str) and value not in ACTIONS and KEY.search(key) else public(value)


def _public_text(text: str) -> str:
    for secret in sorted(_known, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    text = ENVIRONMENT.sub(rf"\1{HIDDEN}", PASSWORD.sub(rf"\1:{HIDDEN}@", text))
    return SIGNATURE.sub(rf"\1{HIDDEN}", text) if "://" in text else text


def learn(config: Mapping[str, Any]) -> None:
    """Take note of the secrets of this run, so that `public` finds them in any text."""
    given = [str(value) for value in ((config.get("launch") or {}).get("env") or {}).values()]
    given += [value.strip() for name, value in os.environ.items() if SAYS_SECRET.search(name)]
    given += [value for key, value in _named(config) if KEY.search(key)]
    for _, text in _named(config):  # parts of a URL may be shown without what makes it one
        given += [found[2] for kind in (PASSWORD, SIGNATURE) for found in kind.finditer(text)]
    _known.update(value for value in given if len(value) >= SHORTEST)


def _named(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield every text with the key that it stands under."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield from _named(part, str(name))
    elif isinstance(value, list):
        for part in value:
            yield from _named(part, key)


def without_query(url: str) -> str:
    """Return a URL without the part after its path, where signatures are; a local path as it is."""
    return url if "://" not in url else urlsplit(url)._replace(query="", fragment="").geturl()


class HideSecrets(logging.Filter):
    """Writes log messages as `public` shows them."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = public(record.getMessage()), None
        if record.exc_info:
            record.exc_text = public(TRACEBACK.formatException(record.exc_info))
        return True


TRACEBACK = logging.Formatter()
HIDE = HideSecrets()  # one, which a handler takes once


def keep_secrets(config: DictConfig, run_folders: list[Path]) -> None:
    """Hide this run's secrets in all logs from now on, and in what Hydra wrote into its folders before."""
    learn(OmegaConf.to_container(config, resolve=False))  # type: ignore[arg-type]
    for handler in logging.getLogger().handlers:
        handler.addFilter(HIDE)
    for path in (path for folder in run_folders for path in folder.glob("*.yaml")):
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        shown = public(content)
        if shown != content:
            OmegaConf.save(OmegaConf.create(shown), path)


OmegaConf.register_new_resolver("public", public, replace=True)
