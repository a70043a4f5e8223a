"""Parses each config once in a process, where Hydra parses all of its files again for every run that is composed."""

from copy import deepcopy
from functools import cache
from io import StringIO
from types import SimpleNamespace
from typing import Any, TextIO

from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.plugins import Plugins
from omegaconf import OmegaConf
from yaml import YAMLError


def parse_configs_once() -> None:
    Plugins.instance()  # registers its own copies of the classes that read files
    for scheme in ("file", "pkg"):
        read: Any = SourcesRegistry.instance().resolve(scheme).load_config
        read.__globals__["OmegaConf"] = SimpleNamespace(load=load)


def load(file: TextIO) -> Any:
    try:
        return deepcopy(parsed(file.read()))
    except YAMLError:
        file.seek(0)
        return OmegaConf.load(file)  # its error names the file


@cache
def parsed(text: str) -> Any:
    return OmegaConf.load(StringIO(text))
