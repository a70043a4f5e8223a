"""Every command that a page, a docstring, a comment or a message shows works as typed.

tests/test_pages.py runs those that need no GPU, network or cluster. The others are composed here, and compared with the
schema and with what a command must have.
"""

import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from scripts import as_in_a_run
from shown_commands import GIVEN, Command, Text, all_texts, commands_in, of_a_plugin
from stores import CONF, ROOT

from eagle3.compose import compose_run
from eagle3.errors import InputError
from eagle3.prompts.licenses.rules import LicenseRules
from eagle3.prompts.privacy import Recogniser
from eagle3.settings.check import check_settings, checked_run
from eagle3.settings.prompts import LicenseSettings
from eagle3.settings.types import validated

NUMBERS = {"steps": 1, "topk": 1, "draft_tokens": 2, "draft_window": 64}  # keys that a message fills in with a number


@pytest.fixture(scope="module")
def texts() -> tuple[Text, ...]:
    return all_texts()


class Badge(Recogniser):
    """The one that a page names as a class of the user's own."""


@pytest.fixture(scope="module", autouse=True)
def folder_of_conf() -> Iterator[None]:
    """Read once: Hydra keeps what it has read."""
    sys.modules["company"] = sys.modules[__name__]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield
    del sys.modules["company"]


def test_shown_commands_compose_fit_the_schema_and_have_what_they_need(texts):
    found = sorted((command for text in texts for command in commands_in(text)), key=lambda each: each.complete)
    complete = {command.where for command in found if command.complete}
    recipes = {"docs/recipes/train.sbatch", "docs/recipes/train.yaml", "docs/recipes/precompute.yaml"}
    assert complete > {"docs/start/your-model.md", "serve.py", "eagle3/head_files/files.py", *recipes}
    once = {(command.script, command.words): command for command in found}  # where it is complete, if so anywhere
    assert len(once) > 80
    for command in once.values():
        check(command)


def check(command: Command) -> None:
    config = composed(command)
    try:
        if command.script == "serve" and "action" not in config:
            raise InputError("no action")
        checked_run(OmegaConf.to_container(config, resolve=True), command.script)
        for key in (word.partition("=")[0] for word in command.words if word.endswith(f"={GIVEN}")):
            OmegaConf.update(config, key, NUMBERS.get(key, "given"))
        if command.complete:
            check_settings(config, command.script)
            NEEDS[command.script](config)
    except InputError as error:
        raise AssertionError(f"{command}\n{error}") from None


def composed(command: Command) -> DictConfig:
    words = [word for word in command.words if word.strip(".…") and not of_a_plugin(word)]
    words = [first_of_a_sweep(word.replace("…", "x")) for word in words]
    config = compose(command.script, overrides=words, return_hydra_config=True)
    return as_in_a_run(config, "RUN")


def first_of_a_sweep(word: str) -> str:
    override = OverridesParser.create().parse_override(word)
    if not override.is_sweep_override():
        return word
    return f"{word.partition('=')[0]}={next(iter(override.sweep_string_iterator()))}"


# --- what a command must have ----------------------------------------------------------------------------------------


def require(config: DictConfig, *keys: str) -> None:
    """One of these keys has a value."""
    if all(OmegaConf.select(config, key) is None for key in keys):
        raise InputError(f"{' or '.join(keys)} is not set")


def precompute_needs(config: DictConfig) -> None:
    stages = [config.stages] if isinstance(config.stages, str) else list(config.stages)
    require(config, "out_dir")
    if {"answers", "features", "estimate"} & set(stages):
        require(config, "target.path")
    if "prompts" in stages:
        prompts = config.prompts
        require(config, *(["target.path"] if prompts.from_target else ["prompts.path", "prompts.sources"]))
        build_privacy(prompts.privacy.policy, prompts.privacy.get("model") is not None)
        licenses = LicenseRules(validated(LicenseSettings, OmegaConf.to_container(prompts.licenses)))
        for license in [prompts.license] if prompts.path else [source.license for source in prompts.sources or ()]:
            if refusal := licenses.license_refusal(license):
                raise InputError(f"prompts.license={license} of the user's own rows: {refusal}")


@cache
def build_privacy(policy: str, has_model: bool) -> None:
    """The strict policy refuses to run without a model."""
    if not has_model:
        compose_run("precompute", "out_dir=DIR", f"prompts/privacy={policy}").prompts.privacy.build()


def serve_needs(config: DictConfig) -> None:
    """What conf/action does not mark as missing."""
    require(config, "target.path", *(["run", "checkpoint"] if config.action == "export" else []))
    if config.action == "compare":
        require(config, "heads", "sweep")
    if config.action == "bench":
        require(config, "head", "bench.plain_url", "bench.head_url")
        require(config, "prompts.path", "bench.prompts")


NEEDS = {
    "precompute": precompute_needs,
    "train": lambda config: require(config, "data.path", "data.source"),
    "serve": serve_needs,
}


def test_the_sources_of_the_page_on_licences_are_taken():
    text = (ROOT / "docs" / "how-to" / "licences.md").read_text()
    [example] = re.findall(r'^```yaml title="team/conf/prompts/ours.yaml"\n(.*?)^```', text, flags=re.M | re.DOTALL)
    config = compose("precompute", ["out_dir=DIR", "target.path=T", "prompts/privacy=patterns"])
    given = yaml.safe_load(example)
    assert given.pop("defaults") == ["default", "_self_"]
    config.merge_with({"prompts": given})
    precompute_needs(config)


# --- other programs --------------------------------------------------------------------------------------------------

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BENCHMARKS = "".join(path.read_text() for path in (ROOT / "benchmarks").rglob("*.py"))  # which share some options
INSTALL = re.compile(r"pip install ([^`\n;:()]*)")


def test_extras_are_installed_from_a_clone_with_the_tested_versions(texts):
    """The name eagle3 is not ours on the package index."""
    wrong = []
    for text in texts:
        for arguments in INSTALL.findall(text.text):
            extras = re.findall(r"\[([\w,-]+)\]", arguments)
            tested = "'.[" not in arguments or "constraints.txt" in arguments
            if "eagle3[" in arguments or not tested:
                wrong.append(f"{text.where}: pip install {arguments}")
            elif "'.[" in arguments and GIVEN not in arguments:
                assert set(extras[0].split(",")) <= PROJECT["optional-dependencies"].keys(), text
    assert not wrong, "\n".join(wrong)


def test_scripts_modules_and_targets_of_shown_commands_are_there(texts):
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    for text in texts:
        for script, rest in re.findall(r"python ((?:benchmarks|docs|tests)/[\w/]+\.py)([^\n`;]*)", text.text):
            assert (ROOT / script).is_file(), text
            for option in re.findall(r"(?<=\s)--[\w-]+", rest):
                assert f'"{option}"' in BENCHMARKS, f"{text.where}: {script} {option}"
        for module in re.findall(r"python -m (eagle3[\w.]*)", text.text):
            assert find_spec(module), text
        for file in re.findall(r"(?:sbatch|pytest) ([\w/.]+)", text.text):
            assert (ROOT / file).exists(), text
        for target in re.findall(r"^make ([\w-]+)", text.text, flags=re.MULTILINE) if text.pasted else ():
            assert target in targets, text
