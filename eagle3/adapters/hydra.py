"""Everything that we use of Hydra beyond its top level: the run's config, the search path, the texts of its errors."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from eagle3.adapters.library import Library
from eagle3.errors import first_line

HYDRA = Library(
    "hydra-core",
    oldest="1.3.8",
    newest="1.3",
    parts=(
        "hydra.core.global_hydra:GlobalHydra.config_loader",
        "hydra.core.config_loader:ConfigLoader.get_group_options(group_name)",
        "hydra.core.config_loader:ConfigLoader.get_search_path",
        "hydra.core.config_loader:ConfigLoader.compute_defaults_list(config_name)",
        "hydra.core.config_loader:ConfigLoader.compute_defaults_list(overrides)",
        "hydra.core.config_loader:ConfigLoader.compute_defaults_list(run_mode)",
        "hydra.core.config_search_path:ConfigSearchPath.get_path",
        "hydra.core.default_element:ResultDefault.config_path",
        "hydra.core.default_element:ResultDefault.package",
        "hydra.experimental.callback:Callback.on_multirun_start(config)",
        "hydra.experimental.callback:Callback.on_multirun_end(config)",
        "hydra._internal.hydra:Hydra.format_config_groups(predicate)",
        "omegaconf:DictConfig._get_full_key(key)",
    ),
)

try:
    from hydra._internal.hydra import Hydra
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException, InstantiationException, OverrideParseException
    from hydra.experimental.callback import Callback
    from hydra.types import RunMode
except ImportError as error:  # a script imports this before anything could print an InputError as one line
    sys.exit(f"error: {HYDRA.unsupported(f'does not fit ({first_line(error)})')}")

__all__ = ["Callback", "HydraConfig", "HydraException", "InstantiationException", "OverrideParseException"]


def skip_list_of_groups() -> None:
    """Do not let `--help` read all groups, which takes Hydra seconds: our help page shows those of the command."""
    if "--hydra-help" not in sys.argv:
        Hydra.format_config_groups = lambda *_, **__: ""  # type: ignore[method-assign]


# --- the run ---------------------------------------------------------------------------------------------------------


def in_sweep() -> bool:
    """Say whether this process runs a job of a sweep."""
    return HydraConfig.initialized() and HydraConfig.get().mode is RunMode.MULTIRUN


def is_composing() -> bool:
    """Say whether Hydra has a search path for `compose`: inside a command, or inside `initialize`."""
    return GlobalHydra.instance().is_initialized()


def group_options(group: str) -> list[str]:
    """Return the names of a group's options, also those of the user's own folders."""
    return GlobalHydra.instance().config_loader().get_group_options(group)


def option_files(config: DictConfig) -> Iterator[tuple[str, Path]]:
    """Yield the package and the YAML file of each option that a composed config with Hydra's part is made of."""
    loader = GlobalHydra.instance().config_loader()
    folders = [
        Path(source.path.removeprefix("file://"))
        for source in loader.get_search_path().get_path()
        if (source.path or "").startswith(("file://", "/"))
    ]
    overrides = list(config.hydra.overrides.task)
    for each in loader.compute_defaults_list(config.hydra.job.config_name, overrides, RunMode.RUN).defaults:
        files = [folder / f"{each.config_path}.yaml" for folder in folders]
        if file := next((file for file in files if file.is_file()), None):
            yield each.package or "", file


def full_key(config: DictConfig) -> str:
    """Return the key of a group in the config that it is a part of."""
    return config._get_full_key(None)


# --- the texts of its errors -----------------------------------------------------------------------------------------

UNKNOWN_KEY = re.compile(r"Could not override '(?P<key>.+?)'")
NOT_A_NAME = re.compile(r"Config group override (deletion value )?must be a string")
UNKNOWN_PLUGIN = re.compile(r"Could not (?:find|load) '(?P<group>hydra/\w+)/(?P<option>\w+)'")
UNKNOWN_OPTION = re.compile(
    r"Could not find '(?P<group>.+)/(?P<option>.+?)'\s+Available options in '.+?':(?P<options>[\w\s-]+)"
)


def message_of(error: BaseException) -> str:
    """Return Hydra's message about an override, without its search path."""
    return f"{error} {error.__cause__ or ''}".partition("Config search path")[0]


def unknown_class(error: Any) -> str | None:
    """Return Hydra's message about a `_target_` that does not exist; None for another error."""
    is_unknown = isinstance(error, InstantiationException) and "locating target" in str(error)
    return str(error).partition(",")[0] if is_unknown else None
