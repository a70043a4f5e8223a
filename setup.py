"""Puts the three scripts and conf/ into the wheel, as eagle3/scripts: pyproject.toml has no key for that."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SCRIPTS = ("precompute.py", "train.py", "serve.py")


class WithScripts(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            folder = Path(self.build_lib) / "eagle3" / "scripts"
            shutil.rmtree(folder, ignore_errors=True)  # of an earlier build
            shutil.copytree("conf", folder / "conf")
            for script in SCRIPTS:
                shutil.copy(script, folder)


setup(cmdclass={"build_py": WithScripts})
