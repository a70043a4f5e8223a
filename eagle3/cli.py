"""Starts the entry scripts: errors become one line and an exit status."""

import functools
import logging
import math
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from eagle3 import interrupts
from eagle3.adapters.hydra import (
    HYDRA,
    HydraConfig,
    HydraException,
    in_sweep,
    options_first,
    skip_list_of_groups,
)
from eagle3.errors import InputError, Interrupted
from eagle3.home import expand_option
from eagle3.hydra_run import CONF, hydra_sweep_dir, launched_rank, output_dir, own_config_dirs
from eagle3.messages import added_key, message_for_user, outside_task, wrong_override
from eagle3.progress import close_bars, show_bars
from eagle3.secrets import keep_secrets, public

log = logging.getLogger(__name__)
PARENT = os.getppid()
FIRST_RANK_S = 3.0  # in which a launcher ends the other ranks
failed_jobs: list[Path] = []  # of a sweep in this process: their folders


def report_errors(task: Callable[[DictConfig], Any]) -> Callable[[DictConfig], Any]:
    """Run an entry script's task. An error that the user can correct is one line and exit status 1, Ctrl-C status 130.

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
            refuse_taken_names()
            return task(config)
        except Interrupted as stop:
            exit_with(str(stop), interrupts.STATUS)
        except KeyboardInterrupt:
            exit_with("interrupted", interrupts.STATUS)
        except Exception as error:
            message = message_for_user(error) or added_key(error, HydraConfig.get().overrides.task)
            if message is None:
                report_bug()
            else:
                log.debug("%s", type(error).__name__, exc_info=error)
            if in_sweep():
                report(message or f"{type(error).__name__}: {error}")
                failed_jobs.append(output_dir())
                return failed_score(OmegaConf.select(config, "callbacks.best.mode"))
            if message is None:  # if raised, Hydra would print all overrides, secrets too
                interrupts.end_silently()
                sys.exit(1)
            exit_with(message, 1)

    return run


def _hydra_folders() -> list[Path]:
    """Return where Hydra wrote the config of this run, and of the sweep that it is a job of."""
    hydra_config = HydraConfig.get()
    folders = [output_dir() / (hydra_config.output_subdir or "")]
    return [*folders, hydra_sweep_dir(hydra_config)] if in_sweep() else folders


def _find_own_modules() -> None:
    """Import modules next to a `--config-dir`, in worker processes too: they are handed `sys.path`."""
    for folder in own_config_dirs():
        parent = str(Path(folder).parent)
        if parent not in sys.path:
            sys.path.append(parent)


def refuse_taken_names() -> None:
    """Raise InputError for an option of one's own that has the name of a built-in one, which Hydra reads instead."""
    for folder in map(Path, own_config_dirs()):
        for file in sorted(folder.rglob("*.yaml")):
            name = file.relative_to(folder)
            if Path(CONF, name).exists():
                raise InputError(
                    f"{file} is not read: eagle3 has conf/{name}, which takes precedence; give yours another name"
                )


def failed_score(mode: str | None) -> float:
    """Return what a sweeper gets from a failed job: worse than any result, and not nan, which ends an Optuna study."""
    return math.inf if mode == "min" else 0.0


def start(main: Callable[[], Any]) -> None:
    """Call a Hydra main, so that what goes wrong outside the task is one line too: overrides, the run's folder."""
    logging.raiseExceptions = False  # else each line that a full disk does not take is a traceback
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # else Hydra prints a traceback and exits by itself
    try:
        HYDRA.require()
        sys.argv[1:] = options_first([expand_option(word) for word in sys.argv[1:]])
        skip_list_of_groups()
        failed_jobs.clear()
        main()
        if failed_jobs:
            sys.exit(1)
    except KeyboardInterrupt:
        exit_with("interrupted", interrupts.STATUS)
    except (InputError, OSError, HydraException, OmegaConfBaseException) as error:
        exit_with(message_for_user(error) or wrong_override(error), 1)
    except Exception as error:
        line = outside_task(error)
        if line is None:
            raise
        exit_with(line, 1)
    finally:
        interrupts.end_silently()


def exit_with(message: str, status: int) -> NoReturn:
    interrupts.end_silently()
    rank = let_first_rank_speak()
    if not rank:
        report(message)
    elif status != interrupts.STATUS:  # which all ranks end with
        report(f"rank {rank} on {platform.node()}: {message}")
    sys.exit(status)


def report_bug() -> None:
    """Print the traceback of the exception that is being handled, without secrets."""
    close_bars()
    let_first_rank_speak()
    print(public(traceback.format_exc()), end="", file=sys.stderr, flush=True)


def let_first_rank_speak() -> int:
    """Return the rank of this process. Most errors are those of all ranks: the launcher ends the others when the first
    has ended, before they repeat them; if the first was the launcher, they end with it."""
    rank = launched_rank()
    if rank:
        time.sleep(FIRST_RANK_S)
        if os.getppid() != PARENT:
            sys.exit(1)
    return rank


def report(message: str) -> None:
    close_bars()
    print(f"error: {public(' '.join(message.split()))}", file=sys.stderr, flush=True)
