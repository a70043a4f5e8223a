"""The site: it builds without a warning, its commands run, and its pages of reference are those of the code.

A command on a page runs here on the bundled target, or its block says what it needs: ```bash title="needs: a GPU".
Those compose at least (tests/test_commands.py).
"""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot
from page_commands import PAGES, Block, blocks, clone, commands, name, own_rows, run_block, write_files
from stores import ASSETS, CONF, ROOT

from eagle3.settings.training import metric_names

sys.path.insert(0, str(ROOT / "docs" / "site"))
sys.path.insert(0, str(ROOT / "docs"))
import keys
import pictures

TUTORIAL = ROOT / "docs" / "start" / "tutorial.md"
README = ROOT / "README.md"
WITH_COMMANDS = [page for page in PAGES if any(block.is_command and not block.needs for block in blocks(page))]
ELSEWHERE = (TUTORIAL, README, ROOT / "docs" / "how-to" / "own-head-kind.md")  # the last by head/test_own_kind.py
OTHERS = [page for page in WITH_COMMANDS if page not in ELSEWHERE]
# They begin with the prompts.
MAKE_DIR = tuple(f"docs/how-to/{page}.md" for page in ("data", "imported-answers", "privacy", "target-prompts"))


# --- the site --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(find_spec("mkdocs") is None, reason="pip install -e '.[docs]'")
@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_asks_nothing_of_the_network(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", "docs/site/mkdocs.yml", "-d", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    built = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.html")}
    assert {"index.html", "start/notebook.html", "reference/keys.html", "files/eagle3/head/anchors.py.html"} <= built
    assert "site/wide.css" in (tmp_path / "start" / "your-model.html").read_text()  # which wraps long lines of code
    assert re.search(r"pre > code \{[^}]*white-space: pre-wrap", (tmp_path / "site" / "wide.css").read_text())
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(r'<(?:script|link|img)[^>]*?(?:src|href)="(https?://[^"]+)"', page.read_text())
        assert loaded == [], page


def test_the_menu_has_at_most_seven_groups_and_the_home_page_no_table():
    menu = (ROOT / "docs/site/mkdocs.yml").read_text().partition("\nnav:\n")[2]
    assert 3 <= len(re.findall(r"^  - ", menu, flags=re.MULTILINE)) <= 7
    home = (ROOT / "docs/index.md").read_text()
    assert "grid cards" in home and not re.search(r"^\|", home, flags=re.MULTILINE)


# --- commands --------------------------------------------------------------------------------------------------------


def run_page(page: Path, folder: Path) -> list[str]:
    """Write the files of a page and run its commands in their order; return what each command block said.

    All but the tutorial begin with the same files, so that a command of one page is not run for another again."""
    said = []
    write_files(page, folder)
    for block in blocks(page):
        if block.is_command and not block.needs:
            said.append("")
            for command in commands(block.text):
                if command in run_already and page != TUTORIAL:
                    continue
                run_already.add(command)
                status, output = run_block(command, folder)
                assert status == 0, f"{block.page}: {command}\n{output}"
                said[-1] += output
    return said


run_already: set[str] = set()


@pytest.fixture(scope="module")
def tutorial(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    folder = clone(tmp_path_factory.mktemp("tutorial"))
    return folder, run_page(TUTORIAL, folder)


@pytest.fixture(scope="module")
def readme(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone with FILE.jsonl, and with DIR, RUN and HEAD as the README's commands leave them."""
    folder = clone(tmp_path_factory.mktemp("readme"))
    refused = json.dumps({"prompt": "Who is it?", "license": "none of yours"}) + "\n"
    for file in ("FILE.jsonl", "chats.jsonl"):
        (folder / file).write_text("".join([*own_rows(24), refused]))
    shutil.copy(ASSETS / "prompts" / "gsm8k.jsonl", folder)
    run_page(README, folder)
    rows = (folder / "DIR" / "answers" / "answers.jsonl").read_text().splitlines()
    (folder / "REGENERATED.jsonl").write_text("".join(regenerated(json.loads(row)) for row in rows))
    return folder


def regenerated(row: dict[str, Any]) -> str:
    """Write the turns of a row as the speculators' regeneration does: tests/test_moving.py says where it is read."""
    rows = []
    for number, ([begin, end], reason) in enumerate(zip(row["turns"], row["finish_reasons"], strict=True)):
        ids = {"input_ids": row["input_ids"][:end], "loss_mask": [0] * begin + [1] * (end - begin), "text": "a decode"}
        told = {"id": f"{row['prompt_id']}_gen{number}", "primary_id": row["prompt_id"]}
        rows.append(told | ids | {"metadata": {"finish_reason": reason, "is_tool_call": False}})
    return "".join(f"{json.dumps(each)}\n" for each in rows)


@pytest.mark.parametrize("page", OTHERS, ids=name)
@pytest.mark.slow
def test_the_commands_of_a_page_run(page, readme, tmp_path):
    folder = clone(tmp_path / "clone")
    for path in readme.iterdir():
        made = path.name in ("DIR", "RUN", "HEAD")
        if made and not (path.name == "DIR" and name(page) in MAKE_DIR):
            shutil.copytree(path, folder / path.name)
        elif path.suffix == ".jsonl":
            shutil.copy(path, folder)
    write_files(ROOT / "docs" / "how-to" / "own-loss.md", folder)  # which research.md continues
    run_page(page, folder)


def test_what_needs_more_says_what():
    marked = [block for page in PAGES for block in blocks(page) if block.is_command and block.title]
    assert all(block.needs for block in marked)
    assert len(marked) < sum(block.is_command for page in PAGES for block in blocks(page)) / 2 + 8


@pytest.mark.slow
def test_the_tutorial_shows_what_its_commands_say(tutorial):
    """Every line, but for numbers, as the commands do less here, and for what it leaves out with an ellipsis."""
    page, said = blocks(TUTORIAL), iter(tutorial[1])
    shown = 0
    for block, following in zip(page, [*page[1:], Block("", "", "", "")], strict=True):
        if not (block.is_command and not block.needs):
            continue
        lines = [without_numbers(line) for line in next(said).splitlines()]
        for line in following.text.splitlines() if following.language == "text" else ():
            if line.startswith("  "):  # which kernels there are depends on the machine
                continue
            pattern = ".*".join(re.escape(part.strip()) for part in without_numbers(line).split("…"))
            assert any(re.fullmatch(pattern, each) for each in lines), (line, lines)
            shown += 1
    assert shown > 10


def without_numbers(line: str) -> str:
    return re.sub(r"\d[\d.,]*([kMG]B)?", "N", line.rstrip())


# --- reference -------------------------------------------------------------------------------------------------------


def test_every_key_of_conf_has_a_comment_and_is_on_the_page():
    page = keys.page()
    for path in CONF.rglob("*.yaml"):
        if path.parent.relative_to(CONF).as_posix() in keys.NO_KEYS:
            continue
        option = keys.read(path)
        assert [setting.key for setting in option.settings if not setting.comment] == [], path
        assert f"## {option.name}" in page or f"## {path.name.removesuffix('.yaml')}.py" in page
        assert all(f"| `{setting.key}` |" in page for setting in option.settings), path


@pytest.mark.slow
def test_the_page_of_metrics_names_those_that_are_logged(tutorial):
    columns = next(csv.reader((tutorial[0] / "outputs/tutorial/run/metrics.csv").read_text().splitlines()))
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs/reference/metrics.md").read_text(), flags=re.MULTILINE)
    named = {metric for row in rows for metric in re.findall(r"`([^`]+)`", row)}
    told = set(columns)
    for numbered, letter in (("accuracy", "K"), ("loss", "K"), ("served_accept_length", "S"), ("served_reach", "D")):
        told = {re.sub(rf"/{numbered}_\d$", f"/{numbered}_{letter}", column) for column in told}
    assert named == told
    assert set(columns) - {"epoch", "step", *NO_GOALS} == metric_names(7)


NO_GOALS = ("train/anchors_per_s", "train/tokens_per_s", "train/data_wait_share", "train/lr", "train/grad_norm")


# Fields of results in benchmarks/results alone, and of a row that is refused.
NOT_OF_THE_COMMAND = {"date", "command_from", "verification_cost", "prompt"}


@pytest.mark.slow
def test_the_page_of_files_names_their_fields(tutorial, readme):
    text = (ROOT / "docs" / "reference" / "files.md").read_text()
    places = {
        "chats.jsonl": readme / "FILE.jsonl",
        "results.json": ROOT / "benchmarks/results/sglang_bench_smollm2_chain_7.json",
        "tune.json": ROOT / "benchmarks/results/sglang_tune/tune.json",
    }
    checked = 0
    for title, body in re.findall(r"^### `(.*?)`\n(.*?)(?=^##|\Z)", text, flags=re.MULTILINE | re.DOTALL):
        path = places.get(title) or readme / title
        path = path if path.exists() else tutorial[0] / "outputs/tutorial/compared" / title
        if not path.exists() or not path.stat().st_size:
            continue
        cells = re.findall(r"^\| (`.*?) \|", body, flags=re.MULTILINE)
        fields = {field for cell in cells for field in re.findall(r"`([^`]+)`", cell)}
        optional = {field for cell in cells if "optional" in cell for field in re.findall(r"`([^`]+)`", cell)}
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.suffix == ".jsonl" else None
        found = set().union(*rows) if rows else set(json.loads(path.read_text()))
        known = found - NOT_OF_THE_COMMAND
        assert fields - optional <= known <= fields, title
        checked += 1
    assert checked >= 10


@pytest.mark.parametrize("draw", pictures.RESULTS, ids=lambda draw: draw.__name__)
def test_a_picture_of_results_shows_the_numbers_of_its_files(draw):
    figure = pyplot.figure()
    numbers = draw(figure)
    pyplot.close(figure)
    path = ROOT / "docs" / "results" / f"{draw.__name__}.svg"
    assert all(f">{number}<" in path.read_text() for number in numbers), "run: python docs/pictures.py"
    assert any(path.name in page.read_text() for page in path.parent.glob("*.md"))


def test_badges_say_what_pyproject_says():
    for badge, drawn in pictures.badges().items():
        assert (ROOT / "docs/badges" / f"{badge}.svg").read_text() == drawn, "run: python docs/pictures.py"
        assert f"docs/badges/{badge}.svg" in README.read_text()
