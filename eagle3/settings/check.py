"""Holds a composed config against its schema, before anything is loaded: one line for the first thing that is wrong."""

import re
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose
from omegaconf import DictConfig, OmegaConf
from pydantic import ValidationError

from eagle3 import ROOT
from eagle3.adapters.hydra import HydraConfig, composing
from eagle3.errors import InputError
from eagle3.secrets import public  # and its resolver, which conf/ uses
from eagle3.settings.flat import flattened
from eagle3.settings.nearest import did_you_mean
from eagle3.settings.parts import validate_without_imports
from eagle3.settings.precomputing import PrecomputeRun
from eagle3.settings.serving import ACTIONS
from eagle3.settings.training import TrainRun
from eagle3.settings.types import UNKNOWN, shown, validated

SCHEMAS: dict[str, Any] = {"train": TrainRun, "precompute": PrecomputeRun}
MISSING = "???"  # OmegaConf's word for a value that must be given
SECRET = "launch.env."
NO_ACTION = f"action is not set; take one of {', '.join(f'action={name}' for name in ACTIONS)}"

RULES = {
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be a text; quote what YAML takes for something else, e.g. KEY='\"2024\"'",
    "list_type": "must be a list",
    "dict_type": "must be a group of keys",
    "finite_number": "must be a finite number",
    "greater_than_equal": "must be {ge} or more",
    "greater_than": "must be above {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be below {lt}",
    "too_short": "must have {min_length} or more entries",
    "too_long": "must have at most {max_length} entries",
    "literal_error": "must be {expected}",
    "rule": "{rule}",
}


def check_settings(config: DictConfig, script: str) -> Any:
    """Return the run that a composed config describes: a TrainRun, a PrecomputeRun, or that of one of ACTIONS.

    Raises InputError for a key that is unknown or not set, or whose value has another type or is out of its range."""
    values: Any = OmegaConf.to_container(config, resolve=True)
    run = checked_run(values, script)
    if missing := sorted(OmegaConf.missing_keys(config)):
        are = "is" if len(missing) == 1 else "are"
        given = " ".join(f"{key}=VALUE" for key in missing)
        raise InputError(f"{' and '.join(missing)} {are} not set; give {given} (--help shows every key)")
    return run


def checked_run(values: dict[str, Any], script: str) -> Any:
    """Return the run of a config as plain values, or None where one of them is not set."""
    if "experiment" in values:
        raise InputError(
            f"experiment: its file sets {', '.join(values['experiment'])} below `experiment`, where nothing reads "
            f"them; begin the file with the line: # @package _global_"
        )
    action = str(values.get("action"))
    if script == "serve" and action not in ACTIONS:
        raise InputError(f"action={shown(values.get('action'))} must be one of {', '.join(ACTIONS)}")
    schema = ACTIONS[action] if script == "serve" else SCHEMAS[script]
    try:
        validate_without_imports(schema, values)
        return validated(schema, values)
    except ValidationError as error:
        faults = [fault for fault in error.errors() if fault["input"] != MISSING]
        if faults:
            options = _options(script) or ([f"action={action}"] if script == "serve" else [])
            raise InputError(in_words(faults[0], script, options)) from None
        return None


def in_words(fault: Mapping[str, Any], script: str, options: list[str]) -> str:
    """Say which key has which value, the rule, and a value that is right."""
    key, kind = _key(fault["loc"]), fault["type"]
    if kind == "value_error":  # an InputError of the group itself
        error = str(fault["ctx"]["error"])
        return error if key in error else f"{key}: {error}"
    if kind == UNKNOWN:
        return unknown_key(key, script, options)
    default = _default(fault["loc"], script, options)
    remedy = f"; the default is {key}={default}" if default not in (None, shown(fault["input"])) else ""
    if kind == "missing":
        return f"{key} is left out and must be there{remedy}"
    value = "…" if key.startswith(SECRET) else public(shown(fault["input"]))
    return f"{key}={value} {_rule(fault)}{remedy}"


def unknown_key(key: str, script: str, options: list[str] | None = None) -> str:
    """Say that nothing has this key, and which one may be meant."""
    options = _options(script) if options is None else options
    action = next((option for option in options if option.startswith("action=")), None)
    if script == "serve" and action is None:
        return NO_ACTION
    nearest = (
        _other_script_with(key, script, options)
        or _option_with(key, script, options)
        or did_you_mean(key, [*known_keys(script, options), "hydra.run.dir"])
    )
    return f"{key} is not a key of {action or 'this config'}{nearest}; --cfg job shows every key"


def _option_with(key: str, script: str, options: list[str]) -> str:
    """Return ` (answers=huggingface has it)` of a key that another option of its group brings, or nothing."""
    group = key.partition(".")[0]
    others = [f"{group}={path.stem}" for path in sorted((ROOT / "conf" / group).glob("*.yaml"))]
    having = [other for other in others if key in known_keys(script, [*options, other])]
    return f" ({' or '.join(having)} has it)" if having else ""


def _other_script_with(key: str, script: str, options: list[str]) -> str:
    """Return ` (precompute.py has it)` of a key or group that this script has none of, or nothing."""
    group = key.partition(".")[0]
    having = [other for other in SCHEMAS if other != script and group.replace("/", ".") in known_keys(other, [])]
    if group.replace("/", ".") in known_keys(script, options) or not having:
        return ""
    return f" ({' and '.join(f'{other}.py' for other in having)} {'has' if len(having) == 1 else 'have'} {group})"


def _rule(fault: Mapping[str, Any]) -> str:
    context = fault.get("ctx", {})
    bounds = {name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in context.items()}
    return RULES.get(fault["type"], "{msg}").format(**bounds, msg=fault["msg"])


def _key(place: tuple[int | str, ...]) -> str:
    """Write the place of a value as Hydra does."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in place if part != "[key]"]
    return "".join(parts).removeprefix(".")


def _default(place: tuple[int | str, ...], script: str, options: list[str]) -> str | None:
    """Return the default value with the same options of conf/."""
    value: Any = _defaults(script, tuple(options))
    for part in place:
        known = part in value if isinstance(value, dict) else isinstance(value, list) and part in range(len(value))
        if not known:
            return None
        value = value[part]
    return None if value == MISSING or "${" in str(value) else shown(value)


def known_keys(script: str, options: list[str]) -> list[str]:
    """Return all keys with these options, and groups of keys."""
    return [key for key, _ in flattened(_defaults(script, tuple(options)), groups=True)]


def free_groups(script: str) -> list[str]:
    """Return the groups that conf/ leaves empty for keys of the user's own; others are filled by an option."""
    empty = [key for key, value in flattened(_defaults(script, tuple(_options(script)))) if value == {}]
    return [key for key in empty if not (ROOT / "conf" / key.replace(".", "/")).is_dir()]


@cache
def _defaults(script: str, options: tuple[str, ...]) -> Any:
    with composing(str(ROOT / "conf")):
        return OmegaConf.to_container(compose(script, overrides=list(options)))


def _options(script: str) -> list[str]:
    """Return the options that the command takes for groups, but its experiment: that may be what is wrong."""
    if not HydraConfig.initialized() or HydraConfig.get().job.config_name != script:
        return [word for word in sys.argv[1:] if _is_option(word, script)] if Path(sys.argv[0]).stem == script else []
    added = {word[1:].partition("=")[0] for word in HydraConfig.get().overrides.task if word.startswith("+")}
    return [
        f"{group}={option}"
        for group, option in HydraConfig.get().runtime.choices.items()
        if isinstance(option, str)
        and not group.startswith(("hydra", "hparams_search", "experiment"))
        and group not in added  # nor a group of one's own: the script has no place for its option
        and (ROOT / "conf" / group).is_dir()
    ]


def _is_option(word: str, script: str) -> bool:
    """Tell whether a word of the command line, where Hydra has refused another, chooses an option of the script."""
    group, _, option = word.partition("=")
    known = re.fullmatch(r"[\w/]+=\w+", word) and (ROOT / "conf" / group / f"{option}.yaml").is_file()
    return bool(known) and (group == "action" or group.replace("/", ".") in known_keys(script, []))
