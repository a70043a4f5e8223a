"""Everything that we use of Hydra beyond its top level: the run's config, the search path, the texts of its errors."""

import re
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from omegaconf import DictConfig, ListConfig, OmegaConf, read_write

from eagle3.adapters.library import Library
from eagle3.errors import InputError, first_line
from eagle3.home import LOCAL_KEY, PATH_KEY, expand_home, expand_override

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
        "hydra.core.override_parser.overrides_parser:OverridesParser.parse_overrides(overrides)",
        "hydra.core.override_parser.types:Override.is_sweep_override",
        "hydra.experimental.callback:Callback.on_job_start(config)",
        "hydra.experimental.callback:Callback.on_multirun_start(config)",
        "hydra.experimental.callback:Callback.on_multirun_end(config)",
        "hydra._internal.utils:get_args_parser",
        "hydra._internal.hydra:Hydra.format_config_groups(predicate)",
        "hydra._internal.hydra:ConfigLoaderImpl.load_configuration(overrides)",
        "hydra._internal.hydra:ConfigLoaderImpl.load_configuration(validate_sweep_overrides)",
        "omegaconf:DictConfig._get_node(key)",
    ),
)

try:
    from hydra._internal import hydra as hydra_internals
    from hydra._internal.hydra import Hydra
    from hydra._internal.utils import get_args_parser
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException, InstantiationException, OverrideParseException
    from hydra.experimental.callback import Callback
    from hydra.types import RunMode
except ImportError as error:  # a script imports this before anything could print an InputError as one line
    sys.exit(f"error: {HYDRA.unsupported(f'does not fit ({first_line(error)})')}")

__all__ = ["Callback", "HydraConfig", "HydraException", "InstantiationException", "OverrideParseException", "RunMode"]


def skip_list_of_groups() -> None:
    """Do not let `--help` read all groups, which takes Hydra seconds: our help page shows those of the command."""
    if "--hydra-help" not in sys.argv:
        Hydra.format_config_groups = lambda *_, **__: ""  # type: ignore[method-assign]


def options_first(words: list[str]) -> list[str]:
    """Return the command line with its keys last: Hydra's parser refuses keys on both sides of an option."""
    keys = get_args_parser().parse_intermixed_args(words).overrides
    options = list(words)
    for key in keys:
        options.remove(key)
    return [*options, *keys]


class ConfigLoader(hydra_internals.ConfigLoaderImpl):  # type: ignore[misc]
    """Hydra's loader, of every config that is composed: for a run, for each job of a sweep, and in a notebook.

    It expands `~` in paths, before Hydra makes the folder of the run, and refuses a folder that a sweep would not use.
    """

    asked_mode: tuple[str | None, list[str], DictConfig] | None = None  # name, overrides and config

    def load_configuration(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        """Hydra's main composes the config twice: to ask whether it is a sweep, and for the run. Here that is once."""
        asked, self.asked_mode = self.asked_mode, None
        if asked and (config_name, overrides, run_mode) == (*asked[:2], RunMode.RUN):
            return asked[2]
        words = [expand_override(word) for word in overrides]
        asks_mode = run_mode is RunMode.MULTIRUN and not validate_sweep_overrides
        if asks_mode and not any(each.is_sweep_override() for each in OverridesParser.create().parse_overrides(words)):
            config = self.load_configuration(config_name, overrides, RunMode.RUN, from_shell)
            self.asked_mode = (config_name, overrides, config)
            return config
        if run_mode is RunMode.MULTIRUN and not asks_mode:
            refuse_run_dir(overrides)
        try:
            config = super().load_configuration(config_name, words, run_mode, from_shell, validate_sweep_overrides)
        except OverrideParseException as error:
            error.override = overrides[words.index(error.override)]  # as it was given
            raise
        refuse_empty(words, config)
        with read_write(config):
            expand_paths(config)
        return config


# Pickled by this name, so that a launcher's processes load the configs of their jobs in the same way.
hydra_internals.ConfigLoaderImpl = ConfigLoader  # type: ignore[misc]


def refuse_run_dir(overrides: list[str]) -> None:
    """Raise InputError if a sweep is given the folder of a single run, which Hydra ignores."""
    for word in overrides:
        key, _, folder = word.lstrip("+").partition("=")
        if key == "hydra.run.dir":
            raise InputError(
                f"hydra.run.dir={folder} is for a single run, and the jobs of a sweep (-m) have folders of their own; "
                f"give hydra.sweep.dir={folder}"
            )


def refuse_empty(words: list[str], config: DictConfig) -> None:
    """Raise InputError for `callbacks={}`, which Hydra merges into what is there, and so leaves as it is."""
    for word in words:
        key, _, value = word.lstrip("+").partition("=")
        if value == "{}" and OmegaConf.select(config, key, throw_on_resolution_failure=False):
            raise InputError(
                f"{word} changes nothing: Hydra merges it into {key}; leave out what is there one by one, e.g. "
                f"~{key}.NAME"
            )


def expand_paths(node: DictConfig | ListConfig, inside: str = "") -> None:
    """Expand `~` in all paths of a config, by the names of their keys. InputError for a URL that must be a path."""
    names: Any = node if isinstance(node, DictConfig) else range(len(node))
    for name in names:
        child: Any = node._get_node(name)
        key = f"{inside}.{name}".removeprefix(".") if isinstance(node, DictConfig) else inside
        if OmegaConf.is_config(child):
            if not (child._is_none() or child._is_missing() or child._is_interpolation()):
                expand_paths(child, key)
        elif isinstance(path := child._value(), str) and PATH_KEY.search(key):
            if "://" in path and LOCAL_KEY.fullmatch(key):
                raise InputError(
                    f"{key}={path} is a URL and must be on this machine; give a local path, and copy files from or to "
                    f"a bucket yourself: only prompts.path, features.path, data.path and checkpoint_copies can be there"
                )
            if path.startswith("~"):
                node[name] = expand_home(path, key)


# --- the run ---------------------------------------------------------------------------------------------------------


def in_sweep() -> bool:
    """Say whether this process runs a job of a sweep."""
    return HydraConfig.initialized() and HydraConfig.get().mode is RunMode.MULTIRUN


def composing(conf: str) -> AbstractContextManager[Any]:
    """Return the context that `compose` needs: Hydra's own inside a command, else one for the folder `conf`."""
    return nullcontext() if GlobalHydra.instance().is_initialized() else initialize_config_dir(conf, version_base="1.3")


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


# --- the texts of its errors -----------------------------------------------------------------------------------------

UNKNOWN_KEY = re.compile(r"Could not override '(?P<key>.+?)'")
NOT_A_NAME = re.compile(r"Config group override (deletion value )?must be a string")
NO_SLURM = re.compile(r'Could not detect "srun"')  # submitit's words
UNKNOWN_PLUGIN = re.compile(r"Could not (?:find|load) '(?P<group>hydra/\w+)/(?P<option>\w+)'")
UNKNOWN_DEFAULT = re.compile(r"In '(?P<file>.+)': Could not load '(?P<option>.+)'")
SECOND_OPTION = re.compile(r"Multiple values for .+\. To override a value use 'override (?P<group>.+): (?P<option>.+)'")
IN_PLUGIN = re.compile(r"hydra_plugins.(?P<name>hydra_\w+)")  # in the path of a file
UNKNOWN_OPTION = re.compile(
    r"Could not find '(?P<group>.+)/(?P<option>.+?)'\s+Available options in '.+?':(?P<options>[\w\s-]+)"
)


def override_message(error: BaseException) -> str:
    """Return Hydra's message about an override, without its search path."""
    return f"{error} {error.__cause__ or ''}".partition("Config search path")[0]


def unknown_class(error: Any) -> str | None:
    """Return Hydra's message about a `_target_` that does not exist; None for another error."""
    is_unknown = isinstance(error, InstantiationException) and "locating target" in str(error)
    return str(error).partition(",")[0] if is_unknown else None
