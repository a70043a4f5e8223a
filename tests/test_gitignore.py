"""What the pages let users write in a clone is ignored by git: `git add .` commits no conversations and no heads."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from page_commands import PAGES, blocks, commands
from shown_commands import all_texts, commands_in
from stores import ROOT

from eagle3.home import PATH_KEY

ELSEWHERE = re.compile(r"://|^[/~$.]|\?\?\?|…|\$\(")
REDIRECTED = re.compile(r">>? *([\w./-]+)|--out[= ]([\w./-]+)|\bmkdir (?:-p )?([\w./-]+)")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository with our .gitignore and nothing else."""
    shutil.copy(ROOT / ".gitignore", tmp_path)
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    return tmp_path


def ignored(clone: Path, paths: list[str]) -> list[str]:
    command = ["git", "check-ignore", "--no-index", "--stdin"]
    done = subprocess.run(command, cwd=clone, input="\n".join(paths), capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout.splitlines()


def test_what_the_pages_commands_read_and_write_is_ignored(clone):
    paths = sorted({path for path in paths_on_pages() if not (ROOT / path).exists()})
    for name in ("chats.jsonl", "data", "runs/first", "heads/first", "bench/first", "serving-1.log"):
        assert name in paths, paths  # so that the test reads what users read
    made = [f"{path}/file" if Path(path).suffix == "" else path for path in paths]
    assert sorted(set(made) - set(ignored(clone, made))) == []


def paths_on_pages() -> Iterator[str]:
    shown = [command.words for text in all_texts() for command in commands_in(text)]
    run = [
        command.split()
        for page in PAGES
        for block in blocks(page)
        if block.is_command
        for command in commands(block.text)
    ]
    for words in (*shown, *run):
        for word in words:
            key, _, value = word.strip("'\"").partition("=")
            if PATH_KEY.search(key.lstrip("+")):
                yield from (path for path in re.findall(r"[\w./$-]+(?![\w:])", value) if not ELSEWHERE.search(value))
        for found in REDIRECTED.findall(" ".join(words)):
            yield from (path for path in found if path and not ELSEWHERE.search(path))


def test_names_of_the_user_s_own_are_ignored_and_their_code_is_not(clone):
    own = [
        "my-chats/july.parquet",
        "export.csv.gz",
        "DIR/prompts/prompts.jsonl",
        "docs/chats.jsonl",
        "team/chats.jsonl",
    ]
    assert ignored(clone, own) == own
    assert ignored(clone, ["team/conf/loss/early.yaml", "team/losses.py", "conf/loss/mine.yaml"]) == []


def test_no_file_of_the_project_is_ignored(clone):
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a clone")
    assert len(files := listed.stdout.splitlines()) > 100 and ignored(clone, files) == []
