"""Errors that a user can correct, as one line."""

import errno
import importlib.metadata
import json
import os
import re
import shlex
import sys
import sysconfig
import traceback
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from itertools import pairwise, takewhile
from operator import attrgetter
from pathlib import Path

from omegaconf.errors import InterpolationToMissingValueError, MissingMandatoryValue, OmegaConfBaseException
from pydantic import ValidationError
from yaml import YAMLError

from eagle3 import ROOT
from eagle3.adapters.hydra import (
    IN_PLUGIN,
    NO_SLURM,
    NOT_A_NAME,
    SECOND_OPTION,
    UNKNOWN_DEFAULT,
    UNKNOWN_KEY,
    UNKNOWN_OPTION,
    UNKNOWN_PLUGIN,
    HydraException,
    InstantiationException,
    OverrideParseException,
    override_message,
    unknown_class,
)
from eagle3.errors import InputError, first_line, install_command
from eagle3.hydra_run import CONF
from eagle3.settings import check
from eagle3.settings.check import free_groups
from eagle3.settings.nearest import did_you_mean
from eagle3.settings.serving import ACTIONS

# Options of Hydra's plugins, and our extras that bring them.
PLUGINS = {
    "optuna": "optuna",
    "joblib": "joblib",
    "submitit_slurm": "submitit",
    "submitit_local": "submitit",
    "ray": "ray-sweep",
}
# Groups for which people give a path instead of an option, and what the path is.
PATHS = {
    "target": "the folder or Hugging Face id of a model",
    "prompts": "a file or folder of conversations",
    "data": "a feature store",
}
NOBODY = re.compile(r"Could not determine home directory|getpwuid\(\): uid not found")  # pathlib's words, and pwd's
NO_KEYS = re.compile(r"trying to access ([\w.]+): node `([\w.]+)` is not a container")  # of OmegaConf
RANK_LOST = re.compile(r"^Dist(Backend|Network|Store)Error: |/gloo/")  # of torch.distributed
PACKAGE = Path(__file__).parent
SCRIPTS = tuple(ROOT / f"{name}.py" for name in ("precompute", "train", "serve"))
WRONG_PATH = {errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG}


def message_for_user(error: Exception) -> str | None:
    """Return the one line that the user sees; None for an error of ours, which is to show its traceback."""
    if isinstance(error, InputError):
        return str(error)
    if getattr(error, "errno", None) == errno.EDQUOT or "No space left on device" in str(error):  # not only OSErrors
        place = getattr(error, "filename", None) or "the output folder"
        again = "run the same command again, train.py with ckpt_path=auto"
        return f"no space left on the disk of {place}; make room and {again}"
    if isinstance(error, OSError) and error.filename is not None:
        advice = "the file system reported an error; run again, or use a folder on another file system"
        if error.errno in WRONG_PATH:
            advice = "give a path that exists and that you may read and write"
        return f"{error.filename}: {error.strerror}; {advice}"
    if isinstance(error, (MissingMandatoryValue, InterpolationToMissingValueError)):
        key = str(error).partition("Missing mandatory value: ")[2].split()[0]
        return f"{key} is not set; give {key}=VALUE (--help shows every key)"
    if isinstance(error, OmegaConfBaseException) and (no_keys := NO_KEYS.search(str(error))):
        value, group = no_keys.groups()
        return f"{error.full_key} is {value}, but {group} has no keys; give {error.full_key} a value of its own"
    if isinstance(error, OmegaConfBaseException):
        return f"{error.full_key or 'the config'}: {str(error).splitlines()[0]}; --cfg job shows every key"
    if type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error):  # torch's, GPU and CPU
        return (
            f"out of memory ({str(error).splitlines()[0]}); take smaller packs or batches (data.pack_tokens, "
            f"answers.batch_tokens, features.batch_tokens), a smaller kernels.loss_chunk or smaller model.* sizes"
        )
    if RANK_LOST.search(f"{type(error).__name__}: {error}"):
        reason = first_line(error).partition(". ")[0]
        return f"no connection to the other ranks ({reason}); the first that ended says why; ckpt_path=auto resumes"
    if NOBODY.search(str(error)):  # e.g. W&B's, in a container that runs as a user of its own
        return (
            f"a library needs this user's home folder or name, and there is none ({error}); set HOME to a folder that "
            f"may be written to, and USER"
        )
    if unknown := unknown_class(error):
        return f"{unknown}: no class or function of that name; give one as module.Class"
    if type(error).__module__.partition(".")[0] == "wandb":
        advice = "run `wandb login`, or take logger.wandb.offline=true, which needs no account"
        if str(error).startswith("Invalid"):
            advice = "correct it in logger.wandb.* or in W&B's variable"
        return f"W&B: {error}; {advice}"
    if isinstance(error, ValidationError) and error.title == "Settings":  # W&B's
        [wrong, *_] = error.errors()
        name, value, rule = str(wrong["loc"][0]), wrong["input"], wrong["msg"]
        return f"W&B: {name}={value}: {rule}; correct the variable WANDB_{name.upper()}, or logger.wandb.{name}"
    return str(error) if isinstance(error, FileNotFoundError) else in_own_code(error)


def in_own_code(error: BaseException) -> str | None:
    """Return the line for an exception that code of the user's own raised, e.g. a callback; None for another.

    What a library raises is the fault of its caller: the innermost frame outside libraries decides."""
    while error.__cause__ is not None:  # Hydra's exception around that of a class that it was to build
        error = error.__cause__
    frames = [(each, _is_ours(each.filename)) for each in traceback.extract_tb(error.__traceback__)]
    place, ours = next(
        (each for each in reversed(frames) if each[1] or not _is_library(each[0].filename)), (None, True)
    )
    where = _module_called(error) if place is None or ours else f"{place.filename} line {place.lineno}, in {place.name}"
    if where is None:
        return _in_callback(error)
    return (
        f"{where}: {type(error).__name__}: {first_line(error)}; this is code of your own: correct it "
        f"(hydra.verbose=true shows the traceback)"
    )


def _in_callback(error: BaseException) -> str | None:
    """Return the line for what a library raised in a callback that the user chose, unless our code is in between."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame in takewhile(lambda each: not _is_ours(each.f_code.co_filename), reversed(frames)):
        kind = type(frame.f_locals.get("self"))
        if "Callback" in {each.__name__ for each in kind.__mro__} and not kind.__module__.startswith("eagle3."):
            return (
                f"callback {kind.__module__}.{kind.__qualname__}: {type(error).__name__}: {first_line(error)}; correct "
                f"its keys in callbacks.*, or leave it out: it may not fit this training (hydra.verbose=true shows the "
                f"traceback)"
            )
    return None


def _module_called(error: BaseException) -> str | None:
    """Return the file of the user's own function that does not take the arguments with which it is called."""
    called = re.match(r"(\w+(\.\w+)*)\(\) (takes|missing|got) ", str(error))
    if not isinstance(error, TypeError) or called is None:
        return None
    for module in [*sys.modules.values()]:
        file = getattr(module, "__file__", None)
        if file and Path(file).is_absolute() and not _is_ours(file) and not _is_library(file):
            with suppress(AttributeError):
                attrgetter(called[1])(module)
                return file
    return None


def _is_ours(file: str) -> bool:
    return PACKAGE in Path(file).parents or Path(file) in SCRIPTS


def _is_library(file: str) -> bool:
    return file.startswith(("<", *_library_folders()))  # "<": code without a file, such as a dataclass's __init__


@cache
def _library_folders() -> tuple[str, ...]:
    """The folders of the standard library, and of installed distributions, also on PYTHONPATH."""
    found = {(str(each.locate_file("")), each.name) for each in importlib.metadata.distributions()}
    holding = Counter(folder for folder, _ in found)
    installed = [folder for folder, number in holding.items() if number > 1]  # a user's own project has one: itself
    return tuple(f"{folder}{os.sep}" for folder in (*installed, *map(sysconfig.get_path, ("stdlib", "platstdlib"))))


def added_key(error: Exception, overrides: Sequence[str]) -> str | None:
    """Return the line for a key added with `+` that no component accepts."""
    if isinstance(error, (TypeError, InstantiationException)):
        for key in (item[1:].partition("=")[0] for item in overrides if item.startswith("+")):
            if f"unexpected keyword argument '{key.rpartition('.')[2]}'" in str(error):
                return unknown_key(key)
    return None


def wrong_override(error: Exception) -> str:
    """Return Hydra's message about an override, without its advice to add unknown keys and its search path."""
    message = override_message(error)
    if isinstance(error, OverrideParseException):
        key, given, value = error.override.partition("=")
        if not given:
            meant = f"action={key} to serve.py" if key in ACTIONS else f"{key}=VALUE"
            return f"{key} is not KEY=VALUE; give {meant} (--help shows every key)"
        meant = shlex.quote(f"{key}={json.dumps(value, ensure_ascii=False)}")
        return f"{error.override} cannot be read; quote a value with special characters: {meant}, and close brackets"
    if unknown := UNKNOWN_KEY.match(message):
        inside = getattr(error.__cause__, "full_key", None) or ""  # of a value in braces: the key in it
        return unknown_key(inside if inside.startswith(f"{unknown['key']}.") else unknown["key"])
    if (plugin := UNKNOWN_PLUGIN.search(message)) and plugin["option"] in PLUGINS:
        group, name = plugin["group"], plugin["option"]
        return f"{group} needs the package of Hydra's {name}; install it: {install_command(PLUGINS[name])}"
    if option := UNKNOWN_OPTION.search(message):
        group, name, options = option["group"], option["option"], option["options"].split()
        top, _, rest = group.partition("/")
        inner = rest.partition("/")[0]
        if top in PATHS and not (inner and (Path(CONF) / top / inner).is_dir()):
            if rest:  # Hydra's reading of target=meta-llama/Llama-3.1-8B
                return f"{top}={rest}/{name} is no option; {PATHS[top]} is {top}.path={rest}/{name}"
            return f"{no_option(group, name, options)}; {PATHS[top]} is {top}.path={name}"
        return no_option(group, name, options)
    if second := SECOND_OPTION.match(message):
        group, name = second["group"], second["option"]
        if word := next((word for word in sys.argv if word.startswith(f"+{group}=")), None):
            return f"{word} adds an option to {group}, which has one; leave out the plus: {word[1:]}"
        return f"the defaults of a config choose {group} a second time; write there: override /{group}: {name}"
    if default := UNKNOWN_DEFAULT.match(message):
        return f"{default['file']}.yaml: its defaults name {default['option']}, which is no option; correct that file"
    return message.strip()


def outside_task(error: Exception) -> str | None:
    """Return the line for what Hydra, a sweeper or a launcher raises in words of its own; None for an error of ours."""
    if isinstance(error, YAMLError):
        return f"a config is not valid YAML: {error}; correct that file"
    if isinstance(error, RecursionError):
        return "the defaults of a config name the file itself, or one that names it; correct your option or experiment"
    if str(error).startswith("Invalid defaults list"):
        return f"{error}; correct that file"
    if isinstance(error.__cause__, OSError) and str(error).startswith("Unable to configure handler"):  # of the log
        return message_for_user(error.__cause__) or str(error.__cause__)
    if NOT_A_NAME.match(str(error)):
        return unnamed_option()
    if NO_SLURM.search(str(error)):
        return (
            "hydra/launcher=submitit_slurm: this machine has no srun; run the command where SLURM takes jobs, or take "
            "hydra/launcher=submitit_local"
        )
    frames = traceback.extract_tb(error.__traceback__)
    if plugin := next(filter(None, (IN_PLUGIN.search(each.filename) for each in frames)), None):
        return (
            f"{plugin['name']}: {type(error).__name__}: {first_line(error)}; correct hydra.sweeper.*, hydra.launcher.* "
            f"or the ranges of the search"
        )
    return None


def no_option(group: str, name: str, options: Sequence[str]) -> str:
    line = f"{group}={name} is no option; take one of {', '.join(options)}{did_you_mean(name, options)}"
    for word, folder in pairwise(sys.argv):
        if word == "--config-dir" and Path(folder, "conf", group, f"{name}.yaml").is_file():
            return f"{line}; {folder}/conf has it: give --config-dir {shlex.quote(f'{folder}/conf')}"
    return line


def unnamed_option() -> str:
    """Say which group is given a number (nan is one), true, false or null: Hydra only names the type."""
    for word in sys.argv[1:]:
        group, _, value = word.lstrip("+~").partition("=")
        options = sorted(path.stem for path in (Path(CONF) / group).glob("*.yaml"))
        if group and options and re.fullmatch(r"null|true|false|nan|inf|[-+.\d].*", value, re.IGNORECASE):
            return no_option(group, value, options)
    return "a group of options is given a number, true, false or null; give it the name of an option"


def unknown_key(key: str) -> str:
    script, group = Path(sys.argv[0]).stem, key.rpartition(".")[0]
    try:
        if group in free_groups(script):
            return f"{group} takes your own keys after a plus: +{key}=…, or +{group}={{{key.rpartition('.')[2]}: …}}"
        return check.unknown_key(key, script)
    except (HydraException, OmegaConfBaseException):  # a script of one's own
        return f"{key} is not a key of this config; --cfg job shows every key"
