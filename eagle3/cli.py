"""Shared by the entry scripts: errors as one line, the one place that instantiates a config, facts of a run."""

import copy
import errno
import functools
import inspect
import json
import logging
import math
import os
import platform
import re
import shlex
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import hydra.utils
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import InterpolationToMissingValueError, MissingMandatoryValue, OmegaConfBaseException
from yaml import YAMLError

from eagle3 import ROOT, __version__, interrupts
from eagle3.adapters.hydra import (
    HYDRA,
    NOT_A_NAME,
    UNKNOWN_KEY,
    UNKNOWN_OPTION,
    UNKNOWN_PLUGIN,
    HydraConfig,
    HydraException,
    InstantiationException,
    OverrideParseException,
    full_key,
    in_sweep,
    message_of,
    skip_list_of_groups,
    unknown_class,
)
from eagle3.errors import InputError, Interrupted, install_command
from eagle3.home import expand_option, quoted
from eagle3.progress import close_bars, show_bars
from eagle3.secrets import keep_secrets, public
from eagle3.settings import check
from eagle3.settings.check import free_groups
from eagle3.settings.help import help_page
from eagle3.settings.nearest import did_you_mean
from eagle3.settings.serving import ACTIONS
from eagle3.settings.types import Settings, validated

log = logging.getLogger(__name__)
Group = TypeVar("Group", bound=Settings)
OmegaConf.register_new_resolver("help_page", lambda *, _root_: help_page(_root_), replace=True)
OmegaConf.register_new_resolver("job_or", lambda time: job_name() or time, replace=True)
OmegaConf.register_new_resolver("variable", lambda name, other: os.environ.get(name) or other, replace=True)
CONF = str(ROOT / "conf")
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
WRONG_PATH = {errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG}

failed_jobs: list[Path] = []  # of a sweep in this process: their folders


def job_name() -> str | None:
    """Return what names this run on every machine where a launcher starts its ranks, each at a moment of its own."""
    if int(os.environ.get("SLURM_NTASKS", 1)) > 1:
        return f"slurm-{os.environ['SLURM_JOB_ID']}"
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    return f"torchrun-{run}" if run else None


def report_errors(task: Callable[[DictConfig], Any]) -> Callable[[DictConfig], Any]:
    """Run an entry script's task: what the user can fix becomes one line and exit status 1, Ctrl-C status 130.

    In a sweep only Ctrl-C ends the other jobs too; the table at the end names a job that failed.
    """

    @functools.wraps(task)
    def run(config: DictConfig) -> Any:
        if in_sweep() and not interrupts.in_command():
            interrupts.end_with_parent()
        keep_secrets(config, _hydra_folders())
        _find_own_modules()
        show_bars(bool(config.get("progress", True)))
        try:
            return task(config)
        except Interrupted as stop:
            exit_with(str(stop), interrupts.STATUS)
        except KeyboardInterrupt:
            exit_with("interrupted", interrupts.STATUS)
        except Exception as error:
            message = message_for_user(error) or added_key(error, HydraConfig.get().overrides.task)
            if in_sweep():
                if message is None:
                    traceback.print_exc()
                report(message or f"{type(error).__name__}: {error}")
                failed_jobs.append(output_dir())
                return failed_score(config)
            if message is None:
                raise
            exit_with(message, 1)

    return run


def _hydra_folders() -> list[Path]:
    """Return where Hydra wrote the config of this run, and of the sweep that it is a job of."""
    hydra_config = HydraConfig.get()
    folders = [output_dir() / (hydra_config.output_subdir or "")]
    return [*folders, Path(hydra_config.sweep.dir)] if in_sweep() else folders


def own_config_dirs() -> list[str]:
    if not HydraConfig.initialized():  # in a notebook
        return []
    return [source.path for source in HydraConfig.get().runtime.config_sources if source.provider == "command-line"]


def _find_own_modules() -> None:
    """Import modules next to a `--config-dir`, in worker processes too: they are handed `sys.path`."""
    for folder in own_config_dirs():
        parent = str(Path(folder).parent)
        if parent not in sys.path:
            sys.path.append(parent)


def failed_score(config: DictConfig) -> float:
    """Return what a sweeper gets from a failed job: worse than any result, and not nan, which ends an Optuna study."""
    return math.inf if OmegaConf.select(config, "callbacks.best.mode") == "min" else 0.0


def start(main: Callable[[], Any]) -> None:
    """Call a Hydra main, so that what goes wrong outside the task is one line too: overrides, the run's folder."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # else Hydra prints a traceback and exits by itself
    try:
        HYDRA.require()
        sys.argv[1:] = map(expand_option, sys.argv[1:])
        skip_list_of_groups()
        failed_jobs.clear()
        main()
        if failed_jobs:
            sys.exit(1)
    except KeyboardInterrupt:
        exit_with("interrupted", interrupts.STATUS)
    except (InputError, OSError, HydraException, OmegaConfBaseException) as error:
        exit_with(message_for_user(error) or wrong_override(error), 1)
    except YAMLError as error:
        exit_with(f"a config is not valid YAML: {error}; correct that file", 1)
    except ValueError as error:
        if isinstance(error.__cause__, OSError) and str(error).startswith("Unable to configure handler"):  # of the log
            exit_with(message_for_user(error.__cause__) or str(error.__cause__), 1)
        if not NOT_A_NAME.match(str(error)):
            raise
        exit_with(unnamed_option(), 1)
    finally:
        interrupts.end_silently()


def message_for_user(error: Exception) -> str | None:
    """Return the one line that the user sees; None for an error of ours, which is to show its traceback."""
    if isinstance(error, InputError):
        return str(error)
    if getattr(error, "errno", None) == errno.EDQUOT or "No space left on device" in str(error):  # not only OSErrors
        place = getattr(error, "filename", None) or "the output folder"
        return f"no space left on the disk of {place}; make room and run the same command again"
    if isinstance(error, OSError) and error.filename is not None:
        advice = "its file system refused or failed; run again, or use a folder on another one"
        if error.errno in WRONG_PATH:
            advice = "give a path that exists and that you may read and write"
        return f"{error.filename}: {error.strerror}; {advice}"
    if isinstance(error, (MissingMandatoryValue, InterpolationToMissingValueError)):
        key = str(error).partition("Missing mandatory value: ")[2].split()[0]
        return f"{key} is not set; give {key}=VALUE (--help shows every key)"
    if isinstance(error, OmegaConfBaseException):
        return f"{error.full_key or 'the config'}: {str(error).splitlines()[0]}; --cfg job shows every key"
    if type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error):  # torch's, GPU and CPU
        return (
            f"out of memory ({str(error).splitlines()[0]}); take smaller packs or batches (data.pack_tokens, "
            f"answers.batch_tokens, features.batch_tokens), a smaller kernels.loss_chunk or smaller model.* sizes"
        )
    if NOBODY.search(str(error)):  # e.g. W&B's, in a container that runs as a user of its own
        return (
            f"a library needs this user's home folder or name, and there is none ({error}); set HOME to a folder that "
            f"may be written to, and USER"
        )
    if unknown := unknown_class(error):
        return f"{unknown}: no class or function of that name; give one as module.Class"
    if type(error).__module__.partition(".")[0] == "wandb":
        return f"W&B: {error}; run `wandb login`, or take logger.wandb.offline=true, which needs no account"
    return str(error) if isinstance(error, FileNotFoundError) else None


def added_key(error: Exception, overrides: Sequence[str]) -> str | None:
    """The line for a key that the user added with `+` and that nothing takes."""
    if isinstance(error, (TypeError, InstantiationException)):
        for key in (item[1:].partition("=")[0] for item in overrides if item.startswith("+")):
            if f"unexpected keyword argument '{key.rpartition('.')[2]}'" in str(error):
                return unknown_key(key)
    return None


def given_keys() -> list[str]:
    """Return the keys that the command line sets; of an option its group. None in a notebook."""
    overrides = HydraConfig.get().overrides.task if HydraConfig.initialized() else ()
    return [each.lstrip("+~").partition("=")[0].partition("@")[0].replace("/", ".") for each in overrides]


def wrong_override(error: Exception) -> str:
    """Return Hydra's message about an override, without its advice to add unknown keys and its search path."""
    message = message_of(error)
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
    return message.strip()


def no_option(group: str, name: str, options: Sequence[str]) -> str:
    return f"{group}={name} is no option; take one of {', '.join(options)}{did_you_mean(name, options)}"


def unnamed_option() -> str:
    """Say which group is given a number, true, false or null: Hydra only names the type."""
    for word in sys.argv[1:]:
        group, _, value = word.lstrip("+~").partition("=")
        options = sorted(path.stem for path in (Path(CONF) / group).glob("*.yaml"))
        if group and options and re.fullmatch(r"null|true|false|[-+.\d].*", value, re.IGNORECASE):
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


def exit_with(message: str, status: int) -> NoReturn:
    interrupts.end_silently()
    report(message)
    sys.exit(status)


def report(message: str) -> None:
    close_bars()
    print(f"error: {public(' '.join(message.split()))}", file=sys.stderr, flush=True)


def build(config: DictConfig, *, leave_out: Sequence[str] = (), **parts: Any) -> Any:
    """Instantiate a config's `_target_` with plain Python values, plus `parts` that only the program knows; keys to
    `leave_out` are for others.

    The call itself is ours, not Hydra's: parts stay the objects they are, and errors keep their type.
    """
    try:
        config = copy.deepcopy(config)  # with its parent, for interpolations
        with open_dict(config):
            for key in leave_out:
                config.pop(key)
        made = hydra.utils.instantiate(config, _convert_="all", _partial_=True)
    except InstantiationException as error:  # of a part inside
        if isinstance(error.__cause__, InputError):
            raise error.__cause__ from None
        raise
    try:
        inspect.signature(made).bind(**parts)
    except TypeError as error:
        raise InputError(f"{full_key(config)}: {config._target_} cannot be built ({error})") from None
    return made(**parts)


def settings(kind: type[Group], config: DictConfig) -> Group:
    """Make the settings of this kind from the keys of a checked config that have its fields' names."""
    values = plain(config)
    return validated(kind, {each.name: values[each.name] for each in fields(kind) if each.name in values})  # type: ignore[arg-type]


def plain(config: DictConfig) -> Any:
    """Return a config as dicts and lists, interpolations resolved."""
    return OmegaConf.to_container(config, resolve=True)


def resolved(config: DictConfig) -> DictConfig:
    """Return a config that needs nothing of this process any more."""
    return OmegaConf.create(plain(config))


def output_dir() -> Path:
    """The folder of this run, also of one job of a sweep."""
    return Path(HydraConfig.get().runtime.output_dir)


def in_own_process() -> int:
    """Run this job of a sweep as a command of its own; its exit status.

    For several GPUs: Lightning starts their ranks with the arguments of this process, which are those of all jobs.
    Under SLURM it would leave that to srun, which a launcher has called for one task.
    """
    own = [word for folder in own_config_dirs() for word in ("--config-dir", folder)]
    name = ["--config-name", str(HydraConfig.get().job.config_name)]
    sweep = Path(HydraConfig.get().sweep.dir).absolute()
    folders = [f"hydra.run.dir={quoted(str(output_dir()))}", f"hydra.sweep.dir={quoted(str(sweep))}"]
    overrides = [*HydraConfig.get().overrides.task, *folders]
    command = [sys.executable, sys.argv[0], *own, *name, *overrides]
    with subprocess.Popen(command, env={k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}) as job:
        try:
            return job.wait()
        except KeyboardInterrupt:
            job.terminate()
            job.wait()
            raise


def how_to_resume(checkpoint: Path) -> str:
    """Say how to resume from the latest checkpoint: the whole command, unless a launcher starts the ranks."""
    if not HydraConfig.initialized():  # a program of the user's own
        return f"resume with ckpt_path={checkpoint}"
    folder = f"hydra.run.dir={quoted(str(output_dir()))}"
    if in_sweep():
        folder = f"hydra.sweep.dir={quoted(HydraConfig.get().sweep.dir)}"
    set_anew = (folder.partition("=")[0], "ckpt_path")
    given = [word for word in sys.argv if word.lstrip("+").partition("=")[0] not in set_anew]
    if job_name():
        return f"resume with the same command and {folder} ckpt_path=auto"
    return f"resume with: {shlex.join(['python', *map(public, given), folder, 'ckpt_path=auto'])}"


def quiet_libraries() -> None:
    """Silence libraries: their progress bars for loading weights and their hints would drown ours."""
    import transformers  # seconds, which prompts and --help do without

    from eagle3.adapters.transformers import require_transformers

    require_transformers()
    warnings.filterwarnings("ignore", message=".*treespec, LeafSpec.*")  # between Lightning and PyTorch
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)


def provenance() -> dict[str, str]:
    return {
        "git_revision": git_revision() or f"v{__version__}",
        **{package: version(package) for package in ("torch", "lightning", "transformers")},
        "python": sys.version.split()[0],
    }


def result_facts(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Return what a result must say to be made again: commit, command, machine and versions.

    `arguments` are those of a script whose main was called with them, by default the command line's. Servers that run
    already may run on another machine.
    """
    versions = provenance()
    words = [str(Path(sys.argv[0]).resolve()), *(sys.argv[1:] if arguments is None else arguments)]
    return {
        "commit": versions.pop("git_revision"),
        # to paste in the repository's root: its own files are named from there
        "command": shlex.join(["python", *(public(word.replace(f"{ROOT}/", "")) for word in words)]),
        "machine": machine(),
        "versions": versions,
    }


def machine() -> str:
    """GPUs and cores of this machine; nvidia-smi counts GPUs without taking memory on them."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        gpus = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        gpus = []
    counted = [f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)]
    return ", ".join([*counted, f"{os.cpu_count()} {platform.machine()} cores"])


def git_revision() -> str:
    """Empty outside a clone of ours, and on a machine without git."""
    if not (ROOT / ".git").exists():  # the repository around an installed package is somebody else's
        return ""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip()
    except OSError:
        return ""
