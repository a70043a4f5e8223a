"""Generated tables are fresh, and links, files and keys that pages name exist; tests/test_commands.py: commands."""

import json
import re
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import tables
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from omegaconf import OmegaConf
from page_commands import PAGES, name
from result import FACTS
from shown_commands import of_a_plugin
from stores import CONF, ROOT

from eagle3.settings.serving import ACTIONS

RESULTS = ROOT / "benchmarks" / "results"
JSON_RESULTS = sorted(RESULTS.rglob("*.json"))


def test_tables_are_those_of_the_result_files():
    for page in tables.PAGES:
        assert tables.filled(page) == page.read_text(), f"{name(page)}; run: python benchmarks/tables.py"


def test_every_table_is_on_a_page():
    shown = {found[1] for page in tables.PAGES for found in tables.MARKED.findall(page.read_text())}
    assert shown == set(tables.TABLES)


def test_every_row_of_a_table_has_the_cells_of_its_header():
    for page in PAGES:
        for table in re.findall(r"(?:^\|.*\n)+", page.read_text(), re.MULTILINE):
            rows = [re.sub(r"`[^`]*`|\\\|", "", row) for row in table.splitlines()]
            odd = [row for row in rows if row.count("|") != rows[0].count("|")]
            assert odd == [], name(page)


def test_a_result_says_where_it_comes_from():
    for path in JSON_RESULTS:
        result = json.loads(path.read_text())
        assert [fact for fact in FACTS if not result.get(fact)] == [], path.name
        date.fromisoformat(result["date"])


def test_a_table_says_how_old_its_results_are_and_where_they_were_measured():
    for page in (ROOT / "docs/results").glob("*.md"):
        for _, table, text, _ in tables.MARKED.findall(page.read_text()):
            line = text.rstrip().splitlines()[-1]
            files = re.findall(r"\[([\w/]+\.json)\]", line)
            assert files, f"{name(page)}: {table}"
            for file in files:
                result = json.loads((RESULTS / file).read_text())
                assert f"{result['date']}, commit {result['commit']}, {tables.short(result['machine'])}" in line


def test_the_matrix_of_versions_is_that_of_the_results_and_of_the_lists():
    text = (ROOT / "docs/reference/supported.md").read_text()
    rows = re.findall(r"^\| project, (.*?) \| (.*?) \| .*? \| (.*?) \|", text, flags=re.MULTILINE)
    versions = {where: {"torch": torch, "transformers": transformers} for where, torch, transformers in rows}
    found: list[dict[str, str]] = [json.loads(path.read_text())["versions"] for path in JSON_RESULTS]
    on_gpus = [each for each in found if isinstance(each, dict) and not each["torch"].endswith("+cpu")]
    for package in ("torch", "transformers"):
        measured = {each[package].partition("+")[0] for each in on_gpus if package in each}
        assert measured == {versions["on GPUs"][package]}
        locked = f"\n{package}=={versions['`constraints.txt`'][package]}\n"
        assert locked in (ROOT / "constraints.txt").read_text()
        lowest = versions["lowest"][package].removesuffix(".0")
        assert f'"{package}>={lowest}"' in (ROOT / "pyproject.toml").read_text()


# Links and files

OTHERS = re.compile(r"(?<=<!-- of others -->\n)(.*?)(?=<!-- end of others -->)", re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE = re.compile(r"`((?:[\w.-]+/)+[\w.-]*\w\.\w+|(?:[\w-]+/)+)`")
OF_A_RUN = ("outputs/", "RUN/", "DIR/", "HEAD/", "data/prompts/")


def test_links_lead_to_files_and_headings():
    for page, target in [(each, target) for each in PAGES for target in LINK.findall(each.read_text())]:
        if target.startswith("http"):
            continue
        file, _, heading = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        assert path.exists(), f"{name(page)} links to {target}"
        assert not heading or heading in headings(path), f"{name(page)} links to {target}"


@cache
def headings(path: Path) -> set[str]:
    """As GitHub names them."""
    titles = re.findall(r"^#+ (.*)$", path.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_files_that_a_page_names_exist():
    for page in PAGES:
        for file in FILE.findall(ours(page.read_text())):
            there = file.startswith(OF_A_RUN) or (ROOT / file).exists() or (page.parent / file).exists()
            assert there, f"{name(page)} names {file}"


def ours(text: str) -> str:
    """A page without what it tells of other projects: of a table about these, the last column is ours."""
    return OTHERS.sub(lambda found: re.sub(r"^\|.*(\|.*\|)$", r"\1", found[1], flags=re.MULTILINE), text)


# Keys

FILES = (".py", ".json", ".jsonl", ".png", ".md", ".safetensors")
SECTIONS = [path.name for path in CONF.iterdir()] + ["kernels", "bench", "launch", "tune", "check"]
NAMED = re.compile(r"(?<!`)`([a-z][a-z0-9_/]*(?:\.[a-z0-9_]+)*)(?:=([^`\s]+))?`(?!`)")


def named_keys() -> dict[tuple[str, str], str]:
    """Each key, with its value if one is named, and the last page that names it."""
    return {
        (key, value): name(page)
        for page in PAGES
        for key, value in NAMED.findall(ours(page.read_text()))
        if value or ("." in key and key.partition(".")[0] in SECTIONS and not key.endswith(FILES))
    }


def composed_configs() -> list[Any]:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        privacy = ["prompts/privacy/model=onnx", "prompts/traffic=production"]
        return [
            compose("train"),
            compose("train", ["loss=cross_entropy_tv"]),
            compose("train", ["data=live", "features=sglang"]),
            compose("precompute", overrides=[*privacy, "answers=huggingface", "features=huggingface"]),
            compose("precompute", overrides=["answers=sglang", "features=sglang", "workers=ray"]),
            compose("precompute", overrides=["prompts=from_target"]),
            *(compose("serve", [f"action={name}"]) for name in ACTIONS),
            *(compose("train", [f"logger={tracker}"]) for tracker in ("wandb", "tensorboard")),
        ]


def test_keys_that_a_page_names_exist():
    configs, named = composed_configs(), named_keys()
    assert len(named) > 200
    wrong = [f"{page}: {key}" for (key, value), page in named.items() if not is_key(key, value, configs)]
    assert wrong == [], "no key and no option of conf"


def is_key(key: str, value: str, configs: list[Any]) -> bool:
    if key in ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.verbose"):  # Hydra's own
        return True
    if key.startswith("hydra."):
        Plugins.instance()  # registers what each plugin takes
        _, group, own = key.split(".", 2)
        nodes = ConfigStore.instance().repo["hydra"][group].values()
        return any(has(getattr(node, "node", None), own) for node in nodes)
    is_option = (CONF / key / f"{value}.yaml").exists() or of_a_plugin(f"{key}={value}")
    return is_option or any(has(config, key) for config in configs)


def has(config: Any, key: str) -> bool:
    *folders, last = key.split(".")
    for folder in folders:
        config = config.get(folder) if OmegaConf.is_dict(config) else None
    return OmegaConf.is_dict(config) and last in config.keys()  # noqa: SIM118 (`in config` leaves out what is ???)


# --- monitoring ------------------------------------------------------------------------------------------------------

# Gauges of sglang/srt/observability/metrics_collector.py, with these names in SGLang 0.5.17 to 0.5.23.
GAUGES = {"sglang:spec_accept_length", "sglang:gen_throughput"}


def test_alert_and_dashboard_query_metrics_that_sglang_exports():
    rules = yaml.safe_load((ROOT / "docs/recipes/prometheus-alert.yaml").read_text())
    dashboard = json.loads((ROOT / "docs/recipes/grafana-dashboard.json").read_text())
    alerts = [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    panels = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert set(re.findall(r"\b[a-zA-Z_]\w*:\w+", " ".join([*alerts, *panels]))) == GAUGES
    assert "sglang:spec_accept_length" in alerts[0]
