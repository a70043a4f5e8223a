"""The wheel alone: installed into an empty folder and run from elsewhere."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest
from stores import ROOT

from eagle3 import __version__

pytestmark = pytest.mark.slow
BUILT_FROM = ("eagle3", "conf", "precompute.py", "train.py", "serve.py", "pyproject.toml")


class Installed(NamedTuple):
    """The folder that the wheel was installed into, and one next to it to run commands in."""

    wheel: Path
    site: Path
    folder: Path

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        # As the console command that pip writes, but Python's other packages are those of the tests.
        code = "import sys; from eagle3.__main__ import main; sys.argv[0] = 'eagle3'; sys.exit(main())"
        environment = os.environ | {"PYTHONPATH": str(self.site), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", code, *arguments]
        return subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    root = tmp_path_factory.mktemp("wheel")
    source = root / "source"
    source.mkdir()
    for name in (*BUILT_FROM, "README.md", "LICENSE"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(root)!r})"  # as pip calls it
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    [wheel] = root.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(root / "site")
    folder = root / "elsewhere"
    folder.mkdir()
    return Installed(wheel, root / "site", folder)


def test_the_wheel_holds_each_option_the_hooks_and_the_types(installed):
    held = set(zipfile.ZipFile(installed.wheel).namelist())
    options = {f"eagle3/scripts/{path.relative_to(ROOT)}" for path in (ROOT / "conf").rglob("*.yaml")}
    code = {str(path.relative_to(ROOT)) for path in (ROOT / "eagle3").rglob("*.py")}
    assert options | code | {"eagle3/py.typed", "eagle3/serving/show/page.html.jinja"} <= held
    assert {name.partition("/")[0] for name in held} == {"eagle3", f"eagle3-{__version__}.dist-info"}


def test_the_console_command_is_the_one_that_is_tested_here():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"eagle3": "eagle3.__main__:main"}


def test_the_installed_package_says_its_version_and_its_commands(installed):
    assert installed.run("--version").stdout == f"eagle3 {__version__}\n"
    usage = installed.run().stdout
    commands = re.findall(r"^  eagle3 (\w+) ", usage, flags=re.MULTILINE)
    assert {"precompute", "train", "export", "bench"} <= {*commands}
    assert str(installed.site / "eagle3" / "scripts" / "conf") in usage
    done = installed.run("trian")
    line = f"error: eagle3 has no command trian; take one of: {', '.join(commands)}\n"
    assert (done.returncode, done.stderr) == (1, line)


def test_an_error_is_one_line_as_that_of_a_script(installed):
    done = installed.run("train", "data.path=nowhere", "ttt_steps=0")
    assert (done.returncode, done.stderr.partition(";")[0]) == (1, "error: ttt_steps=0 must be 1 or more")
