"""What each part of the project needs installed: training, precomputing and export do without the extras."""

import ast
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from stores import ASSETS, ROOT

from eagle3.commands import serve
from eagle3.commands.precompute import precompute
from eagle3.compose import compose_run
from eagle3.errors import InputError
from eagle3.prompts import LIBRARIES, source_at

# What may import the packages of an extra; all other code does without.
NEEDS_EXTRA = {
    "prompts": ("eagle3/prompts",),
    "bench": ("eagle3/decoding/paired.py", "eagle3/training/curves.py"),
    "objects": ("eagle3/storage/object_store.py",),
}  # fmt: skip
# Imported where they are used, after a look whether they are there.
GUARDED = {"triton", "flash_attn", "onnxruntime", "ray", "sglang", "tokenizers"}
FROM_TARGET = ["prompts=from_target", f"target.path={ASSETS}/tiny", "answers=huggingface"]
BENCH = (*serve.BENCH_LIBRARIES, "matplotlib")  # the curves of a training are drawn where it is installed
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def distributions(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(line).name) for line in requirements}


CORE, LINES = distributions(PROJECT["dependencies"]), PROJECT["optional-dependencies"]
SCRIPTS = ("train", "precompute", "serve")


def brought(extra: str) -> set[str]:
    """The distributions of an extra, those of the extras in it too."""
    inner = [name for line in LINES[extra] for name in Requirement(line).extras if line.startswith("eagle3[")]
    return (distributions(LINES[extra]) - {"eagle3"}).union(*map(brought, inner))


EXTRAS = {name: brought(name) for name in LINES}


def locked() -> dict[str, list[str]]:
    """The versions that constraints.txt pins, by distribution: several where they depend on Python's version."""
    versions: dict[str, list[str]] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if not line.startswith("#"):
            requirement = Requirement(line)
            assert str(requirement.specifier).startswith("=="), f"constraints.txt: {line} is no exact version"
            versions.setdefault(canonicalize_name(requirement.name), []).append(str(requirement.specifier)[2:])
    return versions


def test_the_lock_pins_every_dependency_of_the_readme_commands_within_its_bounds():
    pins = locked()
    for line in (*PROJECT["dependencies"], *LINES["prompts"], *LINES["bench"], *LINES["dev"]):
        requirement = Requirement(line)
        if requirement.name == "eagle3":
            continue
        versions = pins.get(canonicalize_name(requirement.name), [])
        assert versions, f"constraints.txt lacks {requirement.name}; run make lock"
        outside = [version for version in versions if version not in requirement.specifier]
        assert not outside, f"constraints.txt pins {requirement.name} {outside}, outside {line}; run make lock"


def imports(path: Path) -> set[str]:
    """The packages other than Python's and ours that a file imports anywhere."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found - set(sys.stdlib_module_names) - {"eagle3", "eagle3_fp8", "eagle3_capture"}


@cache
def installed_distributions() -> Mapping[str, list[str]]:
    return packages_distributions()  # reads what every installed package holds: seconds


def imported() -> Iterator[tuple[str, str, set[str]]]:
    """Each import of the package and the entry scripts: its file, its name, the distributions that may bring it."""
    brought_by = installed_distributions()
    for path in [*sorted((ROOT / "eagle3").rglob("*.py")), *(ROOT / f"{name}.py" for name in SCRIPTS)]:
        for name in imports(path) - GUARDED:
            file = path.relative_to(ROOT).as_posix()
            yield file, name, {canonicalize_name(distribution) for distribution in brought_by[name]}


def test_every_import_is_declared_in_the_core_or_in_the_extra_of_its_folder():
    for file, name, brought_by in imported():
        allowed = CORE.union(*(EXTRAS[extra] for extra, folders in NEEDS_EXTRA.items() if file.startswith(folders)))
        assert brought_by & allowed, f"{file} imports {name}"


@pytest.mark.parametrize(("extra", "libraries"), [("prompts", LIBRARIES), ("bench", BENCH)])
def test_what_a_command_asks_for_is_what_its_extra_brings_and_its_code_imports(extra, libraries):
    brought_by = installed_distributions()
    assert {canonicalize_name(brought_by[name][0]) for name in libraries} == EXTRAS[extra]
    assert set(libraries) <= {name for file, name, _ in imported() if file.startswith(NEEDS_EXTRA[extra])}


# Other packages look for what is installed and may import it: only our own code must do without.
WITHOUT_EXTRAS = """
import builtins
real_import = builtins.__import__

def import_without_extras(name, globals=None, *rest, **options):
    importer = str((globals or {}).get("__name__")).partition(".")[0]
    if importer in ("eagle3", "__main__", "train", "precompute", "serve") and name.partition(".")[0] in BLOCKED:
        raise ModuleNotFoundError(f"{importer} imports {name}", name=name)
    return real_import(name, globals, *rest, **options)

builtins.__import__ = import_without_extras
"""


@pytest.fixture
def without_extras(tmp_path: Path) -> dict[str, str]:
    """The environment of a Python in which our code cannot import a package of the extras."""
    blocked = {*LIBRARIES, *BENCH, *GUARDED}
    (tmp_path / "sitecustomize.py").write_text(f"BLOCKED = {blocked}{WITHOUT_EXTRAS}")
    places = (tmp_path, ROOT, ROOT / "eagle3/engine/hooks")  # the last is the path in SGLang's own process
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, places)), "OMP_NUM_THREADS": "1"}


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_all_but_the_parts_that_need_an_extra_can_be_imported_without_them(without_extras):
    paths = [path for path in sorted((ROOT / "eagle3").rglob("*.py")) if "triton" not in imports(path)]
    files = [path.relative_to(ROOT).with_suffix("").as_posix() for path in paths]
    need = tuple(folder.removesuffix(".py") for folders in NEEDS_EXTRA.values() for folder in folders)
    without = [file for file in files if not file.startswith(need) or file.startswith("eagle3/prompts/reading")]
    modules = [file.removesuffix("/__init__").replace("/", ".") for file in without]
    assert len(modules) > 50
    done = run(without_extras, "-c", f"import {', '.join((*modules, *SCRIPTS))}")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("source", [["prompts.path=x.jsonl"], FROM_TARGET])
def test_the_prompts_stage_without_its_extra_says_so_before_it_writes(tmp_path, source, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasketch", None)
    install = r"pip install -c constraints\.txt -e '\.\[prompts\]' in the clone"
    line = rf"^stages=\[prompts\] needs the package datasketch; install all that it needs: {install}$"
    with pytest.raises(InputError, match=line):
        precompute(compose_run("precompute", "stages=[prompts]", *source, f"out_dir={tmp_path}/out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("action", ["bench", "tune"])
def test_bench_and_tune_ask_for_their_extra_first(monkeypatch, action):
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(InputError, match=rf"action={action} needs the package scipy; .*'\.\[bench\]'"):
        serve.DO[action](OmegaConf.create())


@pytest.mark.parametrize(
    ("command", "status", "answer"),
    [
        (["precompute.py", "--help"], 0, "Raw conversations"),
        (["serve.py", "--cfg", "job"], 0, "progress: true"),
        (["train.py", "data.path=x", "optim.lr=high"], 1, "optim.lr=high must be a number"),
    ],
)
def test_settings_and_what_is_wrong_with_them_are_told_at_once_and_without_the_extras(
    without_extras, command, status, answer, tmp_path
):
    done = run(without_extras, "-X", "importtime", *command, f"hydra.run.dir={tmp_path}")
    assert done.returncode == status and answer in done.stdout + done.stderr
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "hydra" in loaded and not {"torch", "lightning", "transformers"} & loaded  # seconds of each


def test_formats_and_folders_that_need_the_extra_name_it(monkeypatch, tmp_path):
    (tmp_path / "folder").mkdir()
    for name in ("chats.parquet", "chats.jsonl.gz", "chats.json"):
        (tmp_path / name).write_text("{}")
    for name in ("pyarrow", "datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    assert source_at("prompts", str(tmp_path / "chats.json")).name == "chats"
    for name, package in (("chats.parquet", "pyarrow"), ("chats.jsonl.gz", "pyarrow"), ("folder", "datasets")):
        with pytest.raises(InputError, match=rf"path=.*{name}.* needs the package {package}; .*'\.\[prompts\]'"):
            source_at("prompts", str(tmp_path / name))
