"""`~` in paths: on the command line, quoted or not, in lists and YAML files, and in the folders that Hydra makes."""

import getpass
import re
import shlex
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from scripts import composed, run_script
from stores import CONF

from eagle3.errors import InputError
from eagle3.home import PATH_KEY, pasted
from eagle3.messages import message_for_user
from eagle3.settings.check import check_settings, known_keys
from eagle3.settings.serving import ACTIONS

SPECIAL = "ho,me = {1} [x]"  # of a home folder: each would be more than a text without quotes


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / SPECIAL
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    return folder


@pytest.mark.parametrize("path", ["runs/a", "s3://bucket/run", SPECIAL, "an 'a' and \"b\"", "$HOME", "a\\"])
def test_a_path_in_a_command_to_paste_passes_the_shell_and_hydra(path):
    words = shlex.split(f"python train.py data.path={pasted(path)} hydra.run.dir=RUN")
    assert OverridesParser.create().parse_override(words[2]).value() == path


@pytest.mark.parametrize(
    ("script", "word", "key", "expected"),
    [
        ("train", "data.path=~/a b/features", "data.path", "HOME/a b/features"),
        ("train", "data.path=~", "data.path", "HOME"),
        ("train", 'data.path="~/a"', "data.path", "HOME/a"),
        ("train", "data.path=[~/a,'~/b','./~']", "data.path", ["HOME/a", "HOME/b", "./~"]),
        ("train", "data.path=~/${seed}/a", "data.path", "HOME/0/a"),
        ("train", r"data.path=~/a\,b", "data.path", "HOME/a,b"),
        ("train", "data.path=~root/a", "data.path", "/root/a"),
        ("train", "data.path='s3://bucket/~/a'", "data.path", "s3://bucket/~/a"),
        ("train", "hydra.sweep.dir='~/runs'", "hydra.sweep.dir", "HOME/runs"),
        ("train", "+model.own={table: '~/t', note: '~'}", "model.own", {"table": "~/t", "note": "~"}),
        ("train", "+model.own={vocabulary_file: '~/t', any: ~/x}", "model.own.any", "HOME/x"),
        ("precompute", "out_dir='~/d'", "hydra.run.dir", "HOME/d/logs"),
        ("precompute", "prompts.sources=['~/a',{path: ~/b, name: '~'}]", "prompts.sources",
         ["HOME/a", {"path": "HOME/b", "name": "~"}]),
        ("serve", "action=bench bench.prompts={chat: '~/a'}", "bench.prompts.chat", "HOME/a"),
        ("serve", "action=check check.questions=['~']", "check.questions", ["~"]),
    ],
)  # fmt: skip
def test_home_folders_are_expanded_in_paths_and_in_no_other_text(home, script, word, key, expected):
    words = [word] if script != "serve" else word.split(" ", 1)
    config = composed(script, *words, return_hydra_config=True)
    value = OmegaConf.select(config, key)
    found = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    assert found == in_home(expected, home)


@pytest.mark.parametrize(
    ("script", "words", "key"),
    [
        ("train", ["hydra.run.dir=s3://bucket/run"], "hydra.run.dir=s3://bucket/run"),
        ("train", ["init_from=s3://bucket/head"], "init_from=s3://bucket/head"),
        ("serve", ["action=export", "run=RUN", "head=gs://bucket/head"], "head=gs://bucket/head"),
        ("serve", ["action=compare", "heads=[HEAD,s3://bucket/head]"], "heads=s3://bucket/head"),
    ],
)
def test_a_url_where_only_a_path_works_is_refused_before_a_folder_of_that_name_is_made(script, words, key):
    with pytest.raises(InputError, match=f"{key} is a URL and must be on this machine; give a local path"):
        composed(script, *words, return_hydra_config=True)


def in_home(value: object, home: Path) -> object:
    if isinstance(value, list):
        return [in_home(each, home) for each in value]
    if isinstance(value, dict):
        return {key: in_home(each, home) for key, each in value.items()}
    return str(value).replace("HOME", str(home))


def test_an_unknown_user_is_named():
    with pytest.raises(InputError, match=r"data\.path=~nobody-here.*no user nobody-here; .*\./~nobody-here"):
        composed("train", "data.path=['~nobody-here/a']")


def test_a_process_without_a_home_folder_is_told_to_give_the_whole_path(monkeypatch):
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("os.getuid", lambda: 2**31 - 5)
    with pytest.raises(InputError, match=r"init_from=~/head: this process has no home folder .*give the whole path"):
        composed("train", "init_from=~/head")


def test_hydra_makes_the_folders_of_runs_and_sweeps_in_the_home_folder(tmp_path):
    own = tmp_path / "conf" / "experiment"
    own.mkdir(parents=True)
    (own / "mine.yaml").write_text("# @package _global_\nhydra: {sweep: {dir: ~/sweep}}\ndata: {path: ~/nothing}\n")
    given = {
        "run": ("data.path=~/nothing", "hydra.run.dir=~/run"),
        "sweep/1": ("-m", f"--config-dir={tmp_path}/conf", "experiment=mine", "seed=1,2"),
    }
    for folder, words in given.items():
        done = run_script("train", *words, cwd=tmp_path, env={"HOME": str(tmp_path / "home")})
        assert done.returncode == 1 and f"error: {tmp_path}/home/nothing/manifest.json" in done.stderr, done.stderr
        assert (tmp_path / "home" / folder / ".hydra").is_dir()
    assert not (tmp_path / "~").exists()


def test_each_key_that_its_comment_calls_a_file_or_folder_is_a_path():
    """A comment begins with what the value is. Keys that only begin a name or hold many values are not meant."""
    about = re.compile(r"^ *(\w+): [^#\s][^#]*# (?:\w+ )?(?:folder|file|checkpoint) ")
    named = {
        found[1]
        for path in CONF.rglob("*.yaml")
        for line in path.read_text().splitlines()
        if (found := about.match(line)) and "name pattern" not in line
    }
    assert {"path", "head", "dirpath", "cache_dir", "findings", "memory", "run"} <= named
    assert [name for name in sorted(named) if not PATH_KEY.search(name)] == []


def test_texts_are_no_paths():
    keys = {key for script in ("train", "precompute") for key in known_keys(script, [])}
    keys |= {key for action in ACTIONS for key in known_keys("serve", [f"action={action}"])}
    assert {key for key in keys if PATH_KEY.search(key)} & {
        "check.questions", "prompts.name", "prompts.license", "logger.csv", "chat.template_kwargs", "prompts.split",
        "prompts.config", "loss.decay", "target.revision", "data.only_sources",
    } == set()  # fmt: skip


def test_a_library_that_needs_a_home_folder_or_a_user_name_is_one_line(monkeypatch):
    for name in ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.getuid", lambda: 2**31 - 5)
    for ask in (Path.home, getpass.getuser):
        with pytest.raises((RuntimeError, KeyError)) as raised:
            ask()
        assert "set HOME" in str(message_for_user(raised.value))


def test_a_question_mark_in_out_dir_is_refused_before_the_database_misreads_it():
    with pytest.raises(InputError, match=r"out_dir=who\?/dir must be without a question mark"):
        check_settings(composed("precompute", "out_dir='who?/dir'", "target.path=T", "prompts.path=F"), "precompute")
