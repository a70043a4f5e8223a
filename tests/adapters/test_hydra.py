"""Everything that we use of Hydra beyond its top level, by name: a release that changes one fails its test here."""

from dataclasses import replace
from importlib.metadata import version

import pytest
from hydra import compose, initialize_config_dir
from hydra._internal.hydra import Hydra
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import OmegaConf

from eagle3 import cli
from eagle3.adapters.hydra import (
    HYDRA,
    UNKNOWN_KEY,
    UNKNOWN_OPTION,
    UNKNOWN_PLUGIN,
    HydraException,
    InstantiationException,
    full_key,
    group_options,
    in_sweep,
    is_composing,
    message_of,
    option_files,
    skip_list_of_groups,
    unknown_class,
)
from eagle3.cli import CONF

RELEASE = f"hydra-core {version('hydra-core')}"


@pytest.fixture
def conf():
    with initialize_config_dir(CONF, version_base="1.3"):
        yield


def error_of(*overrides: str) -> str:
    with pytest.raises(HydraException) as raised:
        compose("train", overrides=list(overrides))
    return message_of(raised.value)


def test_a_part_that_is_gone_is_one_line_before_a_command_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "HYDRA", replace(HYDRA, parts=("hydra:no_such_part",)))
    with pytest.raises(SystemExit) as stopped:
        cli.start(lambda: None)
    [line] = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 1 and line.startswith(
        f"error: {RELEASE} has no hydra:no_such_part; hydra-core 1.3.8 to"
    )


def test_an_unknown_key_is_found_in_the_error(conf) -> None:
    found = UNKNOWN_KEY.match(text := error_of("optim.no_such_key=1"))
    assert found and found["key"] == "optim.no_such_key", f"{RELEASE} says of an unknown key: {text}"


def test_an_unknown_option_is_found_in_the_error_with_those_that_exist(conf) -> None:
    found = UNKNOWN_OPTION.search(text := error_of("trainer=no_such_option"))
    assert found and (found["group"], found["option"]) == ("trainer", "no_such_option"), f"{RELEASE} says: {text}"
    assert {"ddp", "fsdp"} < set(found["options"].split()), f"{RELEASE} lists the options as: {text}"


def test_a_plugin_that_is_not_installed_is_found_in_the_error(conf) -> None:
    found = UNKNOWN_PLUGIN.search(text := error_of("hydra/launcher=no_such_plugin"))
    assert found and (found["group"], found["option"]) == ("hydra/launcher", "no_such_plugin"), (
        f"{RELEASE} says: {text}"
    )


def test_the_search_path_is_cut_off_the_error(conf) -> None:
    text = error_of("trainer=no_such_option")
    assert CONF not in text.partition("Available options")[2].partition(":")[2], f"{RELEASE} says: {text}"


def test_a_target_that_names_nothing_is_found_in_the_error() -> None:
    with pytest.raises(InstantiationException) as raised:
        instantiate({"_target_": "eagle3.no_such_module.Class"})
    text = str(raised.value)
    assert "eagle3.no_such_module.Class" in str(unknown_class(raised.value)), (
        f"{RELEASE} says of a wrong target: {text}"
    )
    assert unknown_class(ValueError(text)) is None


def test_options_of_a_group_are_those_of_conf(conf) -> None:
    assert is_composing()
    assert {"ddp", "fsdp"} < set(group_options("trainer")), f"{RELEASE} lists other options"


def test_files_of_a_config_are_those_of_its_options(conf) -> None:
    config = compose("train", overrides=["trainer=ddp"], return_hydra_config=True)
    config.hydra.overrides.task = ["trainer=ddp"]
    files = {str(file.relative_to(CONF)): package for package, file in option_files(config)}
    assert files["trainer/ddp.yaml"] == "trainer", f"{RELEASE} names the files of a config differently: {files}"
    assert files["train.yaml"] == "", f"{RELEASE} names the files of a config differently: {files}"


def test_a_part_of_a_config_knows_its_key() -> None:
    config = OmegaConf.create({"a": {"b": {"c": 1}}})
    assert full_key(config.a.b) == "a.b", f"omegaconf {version('omegaconf')}: _get_full_key gives another key"


def test_only_a_job_of_a_sweep_is_in_a_sweep(conf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)
    assert not in_sweep()
    config = compose("train", overrides=["hydra.mode=MULTIRUN"], return_hydra_config=True)
    HydraConfig.instance().set_config(config)
    assert in_sweep(), f"{RELEASE} says otherwise that a job is one of a sweep"


@pytest.mark.parametrize(("flag", "listed"), [("--help", False), ("--hydra-help", True)])
def test_groups_are_listed_only_where_the_page_shows_them(
    monkeypatch: pytest.MonkeyPatch, flag: str, listed: bool
) -> None:
    monkeypatch.setattr(Hydra, "format_config_groups", Hydra.format_config_groups)  # restored after the test
    before = Hydra.format_config_groups
    monkeypatch.setattr("sys.argv", ["train.py", flag])
    skip_list_of_groups()
    assert (Hydra.format_config_groups is before) == listed
