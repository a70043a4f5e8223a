"""--help: what the command does, its own groups, each key with its comment; and the nearest name of a slip."""

import re
import sys

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from scripts import composed, run_script
from stores import CONF

from eagle3 import cli
from eagle3.messages import wrong_override
from eagle3.settings.check import known_keys
from eagle3.settings.help import help_page
from eagle3.settings.nearest import did_you_mean


@pytest.fixture(autouse=True)
def width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


def page(script: str, *overrides: str) -> str:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        assert GlobalHydra.instance().is_initialized()
        return help_page(compose(script, overrides=list(overrides), return_hydra_config=True))


def section(text: str, start: str) -> list[str]:
    return text.partition(f"{start}")[2].partition("\n\n")[0].splitlines()[1:]


def test_a_key_has_the_comment_of_its_yaml():
    lines = section(page("train"), "Keys")
    assert any(re.fullmatch(r"  ttt_steps=7 +number K of training-time test .*", line) for line in lines)
    assert any(re.fullmatch(r"  loss.decay=0.6 +TTT step k has the weight decay\^k; .*", line) for line in lines)
    above = next(number for number, line in enumerate(lines) if line.startswith("  callbacks.best.monitor="))
    assert lines[above + 1].strip() == "accept length expected from a server with chains of ttt_steps draft steps"


def test_a_comment_above_a_group_of_keys_is_about_all_of_them():
    [first] = [line for line in section(page("precompute"), "Keys") if line.startswith("  prompts.duplicates.*")]
    assert "A row is dropped when it repeats an earlier one" in first


def test_the_page_shows_what_the_command_line_chooses():
    text = page("train", "model=eagle3", "optim.lr=0.5")
    [group] = [line for line in section(text, "Groups") if line.startswith("  model ")]
    assert group.split() == ["model", "*eagle3", "eagle31"]
    assert re.search(r"^  optim\.lr=0\.5 ", text, flags=re.MULTILINE)
    assert re.search(r"^  model\.fc_norm=false +RMSNorm", text, flags=re.MULTILINE)  # of the option it builds on


@pytest.mark.parametrize(
    ("script", "own", "foreign"),
    [("train", "optim", "prompts"), ("precompute", "prompts/privacy", "optim"), ("serve", "action", "workers")],
)
def test_groups_are_those_of_the_command(script, own, foreign):
    groups = {line.split()[0] for line in section(page(script), "Groups") if re.match(r"  \S", line)}
    assert own in groups and foreign not in groups
    assert not any(group.startswith("hydra") for group in groups)


def test_a_group_has_the_comment_after_its_option_or_the_one_above_it():
    groups = " ".join(" ".join(section(page("precompute"), "Groups")).split())
    assert "GPU whose measured rates stages=[estimate] uses" in groups
    assert "where answers and features are made: in this process; ray:" in groups


def test_the_page_of_an_action_has_its_own_keys_and_commands():
    text = page("serve", "action=tune")
    assert text.startswith("Find the fastest steps, topk and draft_tokens for your prompts")
    assert "python serve.py action=tune target.path=TARGET" in text and "action=bench" not in text
    keys = {line.split("=")[0].strip() for line in section(text, "Keys")}
    assert {"tune.timed", "head"} <= keys and not {"steps", "bench.repeats"} & keys


def test_help_is_what_hydra_prints_with_the_commands_to_paste():
    done = run_script("precompute", "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Raw conversations → clean prompts")
    assert "python precompute.py target.path=TARGET out_dir=DIR 'stages=[features]'" in done.stdout
    assert "  features.path=null " in done.stdout
    assert "${target.trust_remote_code}" in done.stdout  # Hydra would take what begins with a dollar for its own


@pytest.mark.parametrize(
    ("script", "given", "meant"),
    [
        ("train", "lr", "optim.lr"),
        ("train", "modle", "model"),
        ("precompute", "prompts/privcy", "prompts/privacy"),
        ("train", "learning_rate", "optim.lr"),
        ("precompute", "batch_size", "features.batch_tokens"),
        ("train", "batch_size", "data.pack_tokens"),
        ("train", "kernels/attention", "kernels.attention"),
        ("train", "zebra", None),
    ],
)
def test_a_slip_finds_the_key_that_was_meant(script, given, meant):
    assert did_you_mean(given, known_keys(script, [])) == (f" (did you mean {meant}?)" if meant else "")


def test_a_key_in_a_wrong_group_finds_both_of_its_name():
    known = known_keys("precompute", ["prompts=from_target"])
    assert did_you_mean("answers.seed", known) == " (did you mean prompts.from_target.seed or sampling.seed?)"


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("optm.lr=1", "optm.lr is not a key of this config (did you mean optim.lr?); --cfg job shows every key"),
        ("answers=auto", "answers is not a key of this config (precompute.py has answers); --cfg job shows every key"),
        ("model={zebra: 1}", "model.zebra is not a key of this config; --cfg job shows every key"),
        ("loss.divergence.tv_weight=0.3", "loss.divergence.tv_weight is not a key of this config (loss=cross_entropy_"),
        ("output_dir=DIR", "output_dir is not a key of this config (did you mean hydra.run.dir?); --cfg job shows e"),
        ("export", "export is not KEY=VALUE; give action=export to serve.py (--help shows every key)"),
        ("model=eagl31", "model=eagl31 is no option; take one of eagle3, eagle31 (did you mean eagle31?)"),
        (
            "loss=kl",
            "loss=kl is no option; take one of cross_entropy_tv, function, lk, soft_cross_entropy (did you mean ",
        ),
        (
            "data=features",
            "data=features is no option; take one of live, packed; a feature store is data.path=features",
        ),
        ("data=DIR/features", "data=DIR/features is no option; a feature store is data.path=DIR/features"),
        (
            "data.path=lr=1/A",
            """data.path=lr=1/A cannot be read; quote a value with special characters: 'data.path="lr""",
        ),
    ],
)
def test_a_slip_on_the_command_line_is_one_line_with_what_was_meant(monkeypatch, override, line):
    assert refused("train", override, monkeypatch).startswith(line)


def refused(script: str, override: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the command says of an override that Hydra refuses; tests/test_cli.py has it from a process."""
    monkeypatch.setattr(sys, "argv", [f"{script}.py", override])
    with pytest.raises(HydraException) as error:
        composed(script, override)
    return wrong_override(error.value)


def test_a_config_dir_that_is_one_folder_too_high_is_told(monkeypatch, tmp_path):
    (tmp_path / "conf" / "loss").mkdir(parents=True)
    (tmp_path / "conf" / "loss" / "early.yaml").touch()
    monkeypatch.setattr(sys, "argv", ["train.py", "--config-dir", str(tmp_path), "loss=early"])
    with pytest.raises(HydraException) as error:
        composed("train", "loss=early")
    assert wrong_override(error.value).endswith(f"{tmp_path}/conf has it: give --config-dir {tmp_path}/conf")


def test_the_name_of_a_model_finds_its_option_in_any_case(monkeypatch):
    line = refused("precompute", "target=Qwen3-8B", monkeypatch)
    assert "(did you mean qwen3_8b?); the folder or Hugging Face id of a model is target.path=Qwen3-8B" in line


@pytest.mark.parametrize(
    "override", ["trainer=8", "trainer=nan", "trainer=null", "trainer=true", "+trainer=8", "~trainer=8"]
)
def test_a_number_for_the_name_of_an_option_is_one_line(monkeypatch, capsys, override):
    monkeypatch.setattr(sys, "argv", ["train.py", "loss=lk", override])
    monkeypatch.setattr(cli, "skip_list_of_groups", lambda: None)  # which would last
    with pytest.raises(SystemExit) as stopped:
        cli.start(lambda: composed("train", *sys.argv[1:]))
    [line] = capsys.readouterr().err.splitlines()
    said = f"error: {override.lstrip('+~')} is no option; take one of auto, cpu"
    assert stopped.value.code == 1 and line.startswith(said)


@pytest.mark.parametrize(
    ("defaults", "line"),
    [("[mine]", "the defaults of a config name the file itself"),
     ("{override /optim: adamw}", "Invalid defaults list in"),
     ("[/optim: adamw]", "the defaults of a config choose optim a second time; write there: override /optim: adamw")],
)  # fmt: skip
def test_wrong_defaults_of_an_experiment_are_one_line(monkeypatch, capsys, tmp_path, defaults, line):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(f"# @package _global_\ndefaults: {defaults}\n")
    monkeypatch.setattr(cli, "skip_list_of_groups", lambda: None)  # which would last
    monkeypatch.setattr(sys, "argv", ["train.py"])
    with pytest.raises(SystemExit) as stopped:
        cli.start(lambda: composed("train", f"hydra.searchpath=[{tmp_path}]", "experiment=mine"))
    [said] = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 1 and said.startswith(f"error: {line}")


def test_an_option_with_a_plus_for_a_group_that_has_one_is_told_to_leave_it_out(monkeypatch):
    line = "+loss=lk adds an option to loss, which has one; leave out the plus: loss=lk"
    assert refused("train", "+loss=lk", monkeypatch) == line
    monkeypatch.setattr(sys, "argv", ["train.py", "-m", "+loss=lk,function"])  # each job composes one of them
    second = HydraException("Multiple values for loss. To override a value use 'override loss: lk'")
    assert wrong_override(second).endswith("leave out the plus: loss=lk,function")


def test_an_error_of_a_sweeper_is_one_line(monkeypatch, capsys):
    sweeper = pytest.importorskip("hydra_plugins.hydra_optuna_sweeper._impl")
    monkeypatch.setattr(cli, "skip_list_of_groups", lambda: None)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    wrong_range = OverridesParser.create().parse_override("optim.lr=interval(0.01,0.001)")
    with pytest.raises(SystemExit):
        cli.start(lambda: sweeper.create_optuna_distribution_from_override(wrong_range))
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: hydra_optuna_sweeper: ValueError: The `low` value must be smaller")


@pytest.mark.parametrize("override", ["prompts.roles={Kundin: user}", "prompts.roles.Kundin=user"])
def test_a_key_of_ones_own_without_its_plus_is_told_how_to_be_given(monkeypatch, override):
    ways = "+prompts.roles.Kundin=…, or +prompts.roles={Kundin: …}"
    assert refused("precompute", override, monkeypatch) == f"prompts.roles takes your own keys after a plus: {ways}"
