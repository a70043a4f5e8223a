"""Ctrl-C and SIGTERM at moments when a command imports modules or ends. A stop while it works: tests/test_cli.py."""

import signal
import subprocess
import sys

import pytest
from omegaconf import OmegaConf
from scripts import Script, composed
from stores import ROOT

from eagle3.settings.check import check_settings

# Python imports this at its start. It sends this process two signals when it imports a module.
SITECUSTOMIZE = """
import os, sys

class Sender:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["SIGNAL_AT"]:
            sys.meta_path.remove(self)
            for _ in range(2):
                os.kill(os.getpid(), int(os.environ["SIGNAL"]))

sys.meta_path.insert(0, Sender())
"""


@pytest.mark.parametrize(
    ("script", "module", "number", "arguments"),
    [
        ("train", "numpy", signal.SIGINT, ("data.path=DIR",)),  # torch imports it in C++, and would take no notice
        ("serve", "torch.fx", signal.SIGINT, ("action=check", "head=HEAD")),  # a crash at the exit
        ("precompute", "duckdb", signal.SIGTERM, ("stages=[prompts]", "prompts.path=FILE", "prompts/privacy=off")),
        ("-m eagle3 export", "omegaconf", signal.SIGINT, ()),
    ],
)
def test_a_signal_while_a_command_imports_a_module_ends_it(tmp_path, script, module, number, arguments):
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE)
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "SIGNAL_AT": module, "SIGNAL": str(int(number))}
    folder = f"out_dir={tmp_path}/dir" if script == "precompute" else f"hydra.run.dir={tmp_path}/run"
    if script.startswith("-m"):
        command = [sys.executable, *script.split()]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, check=False)
        error, status = done.stderr, done.returncode
    else:
        process = Script(script, *arguments, folder, cwd=tmp_path, env=env)
        error, status = process.communicate()[1], process.returncode
    assert (status, error) == (130, "error: interrupted\n")


def test_further_signals_change_nothing_once_a_command_has_said_why_it_ends():
    program = """
import atexit, os, signal
from eagle3 import interrupts
interrupts.end_at_once()
from eagle3 import cli

def main():
    interrupts.raise_interrupts()
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        print("stopped")

atexit.register(os.kill, os.getpid(), signal.SIGINT)
cli.start(main)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr) == (130, "error: interrupted\n")


def test_ctrl_c_while_a_part_of_a_config_is_imported_is_no_fault_of_the_config(tmp_path, monkeypatch):
    """In a sweep's worker process, where signals raise KeyboardInterrupt."""
    (tmp_path / "stopped_part.py").write_text("raise KeyboardInterrupt\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = composed("train", "data.path=DIR", "loss_mask._target_=stopped_part.Mask")
    OmegaConf.update(config, "run_dir", "RUN")
    with pytest.raises(KeyboardInterrupt):
        check_settings(config, "train")


def test_a_worker_of_a_sweep_ends_when_the_sweep_is_killed():
    worker = """
import signal, time
from eagle3 import interrupts
interrupts.LOOK_S = 0.05
interrupts.end_with_parent()
signal.signal(signal.SIGTERM, lambda number, frame: (print("saved", flush=True), signal.signal(number, signal.SIG_DFL)))
print("ready", flush=True)
while True:
    time.sleep(1)
"""
    sweep = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {worker!r}])"
    with subprocess.Popen([sys.executable, "-c", sweep], stdout=subprocess.PIPE, text=True, cwd=ROOT) as started:
        assert started.stdout is not None and started.stdout.readline() == "ready\n"
        started.kill()
        assert started.stdout.read() == "saved\n"  # to its end, which is that of the worker
