"""The pages say what the result files say, and name files and keys that exist; tests/test_commands.py: their commands.

A number in a page's text comes from a file, named in a comment in the same paragraph that no reader sees:

    trains 76.7 k tokens/s and waits for data 0.1 % of the time
    <!-- end_to_end.json: 76.7 k = runs[0].tokens_per_s; 0.1 % = runs[0].data_wait_share -->

or is no measurement, a setting for instance, which a comment says too: <!-- given: 0.7 -->. Tables between the markers
`table:` and `end of table` are written by benchmarks/tables.py.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tables
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from result import FACTS
from shown_commands import of_a_plugin
from stores import CONF, ROOT

RESULTS = ROOT / "benchmarks" / "results"
# The page on prompts has numbers without comments yet; its links and commands are held like all others.
COUNTED = [page for page in tables.PAGES if page.parent.name != "prompts"]
PAGES = [*tables.PAGES, *(ROOT / name for name in ("benchmarks/README.md", "CHANGELOG.md", "CONTRIBUTING.md"))]
JSON_RESULTS = sorted(RESULTS.rglob("*.json"))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


# Numbers

CLAIM = re.compile(r"<!-- ([\w/]+\.(?:json|md)|given):\s(.*?) -->", re.DOTALL)
SHOWN = re.compile(r"([+-]?)([\d,]*\d(?:\.\d+)?)(?: ?(k|%|M)\b)?".replace(r"\b", r"(?!\w)"))
SCALES = {"k": 1e-3, "M": 1e-6, "%": 100, None: 1}
# Names and places that hold digits, code, and the targets of links.
NO_NUMBERS = re.compile(
    r"```.*?```|^    .*$|`[^`]*`|\]\([^)]*\)|<!--.*?-->|arXiv:[\d.]+|EAGLE-3\.1|Llama-3\.\d|Apache-[\d.]+|"
    r"Python [\d.]+(?: to [\d.]+)?|(?:Qwen|SGLang|torch|lightning|webdataset) ?[\d.]+",
    re.DOTALL | re.MULTILINE,
)
MEASURED = re.compile(r"(?<![\w.])[+-]?\d[\d,]*(?:\.\d+)?(?: ?(?:%|k\b(?! ?B)))?")


class Node:
    """A JSON value, read as in a program: `heads["recipe"].decoded["held out 3"].accept_length`; lists by name too."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __getattr__(self, key: str) -> Any:
        return self[key]

    def __getitem__(self, key: str | int) -> Any:
        found = self._value
        if isinstance(found, list) and isinstance(key, str):
            [found] = [each for each in found if each["name"] == key]
        else:
            found = found[key]
        return Node(found) if isinstance(found, (dict, list)) else found

    def __iter__(self) -> Iterator[Any]:
        values = self._value.values() if isinstance(self._value, dict) else self._value
        return (Node(each) if isinstance(each, (dict, list)) else each for each in values)


@dataclass(frozen=True)
class Claim:
    page: str
    file: str
    shown: str
    expression: str

    def value(self) -> float:
        top = json.loads((RESULTS / self.file).read_text())
        names = {key: Node(each) if isinstance(each, (dict, list)) else each for key, each in top.items()}
        allowed = {"min": min, "max": max, "sum": sum, "len": lambda node: len(list(node)), "abs": abs}
        return eval(self.expression, {"__builtins__": {}, **allowed, **names})

    def holds(self) -> bool:
        if self.file.endswith(".md"):
            text = (RESULTS / self.file).read_text()
            return re.search(rf"(?<![\d.,]){re.escape(self.shown)}(?!\d)", text) is not None
        sign, digits, unit = SHOWN.fullmatch(self.shown).groups()  # type: ignore[union-attr]
        shown = float(digits.replace(",", "")) * (-1 if sign == "-" else 1)
        half = 0.5 * 10.0 ** -len(digits.partition(".")[2])
        return abs(self.value() * SCALES[unit] - shown) <= half * (1 + 1e-9)


def paragraphs(page: Path) -> list[str]:
    """Outside of generated tables and fenced code."""
    text = tables.MARKED.sub("", page.read_text())
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return [each for each in re.split(r"\n\s*\n", text) if each.strip()]


def claims(page: Path) -> list[tuple[str, list[Claim], list[str]]]:
    """Of each paragraph its text, what it takes from files, and the numbers that are none of a file's."""
    found = []
    for paragraph in paragraphs(page):
        taken, given = [], []
        for file, body in CLAIM.findall(paragraph):
            parts = [" ".join(part.split()) for part in body.split(";")]
            if file == "given":
                given += parts
            else:
                taken += [Claim(name(page), file, *map(str.strip, f"{part} = ".split(" = ")[:2])) for part in parts]
        found.append((NO_NUMBERS.sub(" ", paragraph), taken, given))
    return found


CLAIMS = [claim for page in COUNTED for _, taken, _ in claims(page) for claim in taken]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: f"{claim.page}: {claim.shown}")
def test_a_number_in_the_text_is_that_of_its_file(claim: Claim) -> None:
    assert claim.holds(), claim if claim.file.endswith(".md") else f"{claim}: the file has {claim.value()}"


@pytest.mark.parametrize("page", COUNTED, ids=name)
def test_every_number_in_the_text_names_its_file(page: Path) -> None:
    missing = []
    for text, taken, given in claims(page):
        for number in sorted([claim.shown for claim in taken] + given, key=len, reverse=True):
            text, places = re.subn(rf"(?<![\d.,]){re.escape(number)}(?!\d)", " ", text)
            assert places, f"{name(page)}: {number} is in a comment and not in its paragraph"
        missing += [found for found in MEASURED.findall(text) if re.search(r"[.,%k]", found.strip(",."))]
    assert not missing, f"{name(page)}: no file is named for {missing}"


@pytest.mark.parametrize("page", tables.PAGES, ids=name)
def test_tables_are_those_of_the_result_files(page: Path) -> None:
    assert tables.filled(page.read_text()) == page.read_text(), "run: python benchmarks/tables.py"


def test_every_table_is_on_a_page() -> None:
    shown = {found[1] for page in tables.PAGES for found in tables.MARKED.findall(page.read_text())}
    assert shown == set(tables.TABLES)


@pytest.mark.parametrize("path", JSON_RESULTS, ids=name)
def test_a_result_says_where_it_comes_from(path: Path) -> None:
    result = json.loads(path.read_text())
    assert [fact for fact in FACTS if not result.get(fact)] == []


# Links and files

OTHERS = re.compile(r"(?<=<!-- of others -->\n)(.*?)(?=<!-- end of others -->)", re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE = re.compile(r"`((?:[\w.-]+/)+[\w.-]*\w\.\w+|(?:[\w-]+/)+)`")
OF_A_RUN = ("outputs/", "RUN/", "DIR/", "HEAD/", "data/prompts/")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        if target.startswith("http"):
            continue
        file, _, heading = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        assert path.exists(), f"{name(page)} links to {target}"
        if heading:
            assert heading in headings(path), f"{name(page)} links to {target}"


def headings(path: Path) -> set[str]:
    """As GitHub names them."""
    titles = re.findall(r"^#+ (.*)$", path.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    for file in FILE.findall(ours(page.read_text())):
        if not file.startswith(OF_A_RUN):
            assert (ROOT / file).exists() or (page.parent / file).exists(), f"{name(page)} names {file}"


def ours(text: str) -> str:
    """A page without what it tells of other projects: of a table about these, the last column is ours."""
    return OTHERS.sub(lambda found: re.sub(r"^\|.*(\|.*\|)$", r"\1", found[1], flags=re.MULTILINE), text)


def test_the_tree_of_the_readme_is_that_of_the_folders() -> None:
    [tree] = re.findall(r"```text\n(train\.py.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    places = set()
    for line in tree.splitlines():
        names = re.split(r"  +", line.strip())[0].split()
        folder = ROOT / "eagle3" if line.startswith(" ") else ROOT
        places |= {folder / each for each in names}
    assert all(place.exists() for place in places)
    rooms = {path.parent for path in (ROOT / "eagle3").glob("*/__init__.py")}
    assert rooms <= places, "a package is not in the tree"


# Keys

FILES = (".py", ".json", ".jsonl", ".png", ".md", ".safetensors")
SECTIONS = [path.name for path in CONF.iterdir()] + ["kernels", "bench", "launch", "tune", "check"]
NAMED = re.compile(r"(?<!`)`([a-z][a-z0-9_/]*(?:\.[a-z0-9_]+)*)(?:=([^`\s]+))?`(?!`)")
KEYS = sorted(
    {
        (name(page), key, value)
        for page in PAGES
        for key, value in NAMED.findall(ours(page.read_text()))
        if value or ("." in key and key.partition(".")[0] in SECTIONS and not key.endswith(FILES))
    }
)


@pytest.fixture(scope="module")
def configs() -> list[Any]:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        privacy = ["prompts/privacy/model=onnx", "prompts/traffic=production"]
        return [
            compose("train"),
            compose("train", ["loss=cross_entropy_tv"]),
            compose("precompute", overrides=privacy),
            compose("precompute", overrides=["answers=sglang", "features=sglang", "workers=ray"]),
            compose("serve"),
            *(compose("train", [f"logger={tracker}"]) for tracker in ("wandb", "tensorboard", "mlflow")),
        ]


@pytest.mark.parametrize(("page", "key", "value"), KEYS)
def test_keys_that_a_page_names_exist(page: str, key: str, value: str, configs: list[Any]) -> None:
    option = CONF / key / f"{value}.yaml"
    if key in ("hydra.run.dir", "hydra.sweep.dir"):  # Hydra's own
        return
    if key.startswith("hydra."):
        files = (CONF / "hydra" / key.split(".")[1]).glob("*.yaml")
        assert any(re.search(rf"^ *{key.rpartition('.')[2]}: ", file.read_text(), flags=re.MULTILINE) for file in files)
        return
    if option.exists() or of_a_plugin(f"{key}={value}") or any(has(config, key) for config in configs):
        return
    pytest.fail(f"{page} names {key}, which is no key and no option of conf")


def has(config: Any, key: str) -> bool:
    *folders, last = key.split(".")
    for folder in folders:
        config = config.get(folder) if OmegaConf.is_dict(config) else None
    return OmegaConf.is_dict(config) and last in config.keys()  # noqa: SIM118 (`in config` leaves out what is ???)


def test_the_checks_find_what_they_look_for() -> None:
    assert len(CLAIMS) >= 30
    assert not Claim("", "end_to_end.json", "76.8 k", "runs[0].tokens_per_s").holds()
    assert Claim("", "end_to_end.json", "76.7 k", "runs[0].tokens_per_s").holds()
