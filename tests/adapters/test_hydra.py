"""What we use of Hydra beyond its top level and no other test shows: tests/test_help.py has its errors."""

from dataclasses import replace
from importlib.metadata import version

import hydra
import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra._internal.utils import get_args_parser
from hydra.utils import instantiate

from eagle3 import cli
from eagle3.adapters.hydra import HYDRA, InstantiationException, options_first, skip_list_of_groups, unknown_class
from eagle3.hydra_run import CONF


def test_a_part_that_is_gone_is_one_line_before_a_command_starts(monkeypatch, capsys):
    monkeypatch.setattr(cli, "HYDRA", replace(HYDRA, parts=("hydra:no_such_part",)))
    with pytest.raises(SystemExit) as stopped:
        cli.start(lambda: None)
    [line] = capsys.readouterr().err.splitlines()
    found = f"error: hydra-core {version('hydra-core')} has no hydra:no_such_part; hydra-core 1.3.8 to"
    assert stopped.value.code == 1 and line.startswith(found)


def test_a_target_that_names_nothing_is_found_in_the_error():
    with pytest.raises(InstantiationException) as raised:
        instantiate({"_target_": "eagle3.no_such_module.Class"})
    assert "eagle3.no_such_module.Class" in str(unknown_class(raised.value))
    assert unknown_class(ValueError(str(raised.value))) is None


@pytest.mark.parametrize(
    "words", [["a=1", "--config-dir", "team/conf", "b=2"], ["a=1", "-m", "b=2", "--config-dir", "team/conf"]]
)
def test_keys_may_be_on_both_sides_of_an_option(words):
    given = get_args_parser().parse_args(options_first(words))
    assert (given.overrides, given.config_dir, given.multirun) == (["a=1", "b=2"], "team/conf", "-m" in words)


@pytest.mark.parametrize(("flag", "listed"), [("--help", False), ("--hydra-help", True)])
def test_groups_are_listed_only_where_the_page_shows_them(monkeypatch, flag, listed):
    monkeypatch.setattr(Hydra, "format_config_groups", Hydra.format_config_groups)  # restored after the test
    before = Hydra.format_config_groups
    monkeypatch.setattr("sys.argv", ["train.py", flag])
    skip_list_of_groups()
    assert (Hydra.format_config_groups is before) == listed


def test_a_run_composes_its_config_once(tmp_path, monkeypatch):
    composed, load = [], ConfigLoaderImpl.load_configuration
    monkeypatch.setattr(ConfigLoaderImpl, "load_configuration", lambda *a, **k: composed.append(a) or load(*a, **k))
    monkeypatch.setattr("sys.argv", ["train.py", "seed=7", f"hydra.run.dir={tmp_path}"])
    seeds: list[int] = []
    hydra.main(version_base="1.3", config_path=CONF, config_name="train")(lambda config: seeds.append(config.seed))()
    assert len(composed) == 1 and seeds == [7]
