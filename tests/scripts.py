"""The three scripts: as real processes with output, signals and an exit status; as calls; and their configs."""

import importlib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forks import Forked, run_forked
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from stores import CONF, ROOT


class Script(subprocess.Popen[str]):
    """`python NAME.py ARGUMENTS` in the folder `cwd`, with the variables `env` besides those of this process."""

    def __init__(
        self, name: str, *arguments: str, cwd: Path = ROOT, env: Mapping[str, str] | None = None, **streams: Any
    ) -> None:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | streams
        super().__init__([sys.executable, script_path(name, cwd), *arguments], cwd=cwd, env=environment(env), **streams)


def script_path(name: str, cwd: Path) -> str:
    return str(next(folder / f"{name}.py" for folder in (cwd, ROOT) if (folder / f"{name}.py").exists()))


def environment(more: Mapping[str, str] | None) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **(more or {})}


def run_script(
    name: str, *arguments: str, cwd: Path = ROOT, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a script to its end, in a process that has imported the large libraries."""
    return run_forked(script_path(name, cwd), *arguments, cwd=cwd, env=environment(env))


def finished(
    name: str, *arguments: str, cwd: Path = ROOT, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a script that must end with status 0."""
    done = run_script(name, *arguments, cwd=cwd, env=env)
    assert done.returncode == 0, done.stderr
    return done


def start_script(name: str, *arguments: str, log: Path, env: Mapping[str, str] | None = None) -> Forked:
    """Start a script in such a process, in a session of its own; stderr goes to `log`."""
    files = (os.devnull, str(log))
    return Forked(script_path(name, ROOT), *arguments, cwd=ROOT, env=environment(env), files=files, own_session=True)


def call_script(name: str, *overrides: str, output_dir: Path) -> Any:
    """Run a script's task in this process, as starting Python and PyTorch takes seconds."""
    config = composed(name, *overrides, return_hydra_config=True)
    return importlib.import_module(name).main(as_in_a_run(config, str(output_dir)))


def composed(script: str | None, *overrides: str, conf: Path = CONF, **options: Any) -> DictConfig:
    with initialize_config_dir(str(conf), version_base="1.3"):
        return compose(script, list(overrides), **options)


def as_in_a_run(config: DictConfig, output_dir: str) -> DictConfig:
    """Let Hydra know a config that was composed with its own part; return the part that a task gets."""
    with read_write(config), open_dict(config):
        config.hydra.runtime.output_dir = output_dir
        HydraConfig.instance().set_config(config)
        return OmegaConf.masked_copy(config, [key for key in config if key != "hydra"])
