"""action=compare sweep=FOLDER: its table must be what its compare.json says, and is not made twice."""

import copy
import json
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
import torch
from exported_head import save_checkpoint
from scripts import call_script, run_script
from serving_fixtures import serve_run
from stores import ASSETS
from taught_head import taught_head

from eagle3.commands import sweep as commands
from eagle3.decoding.paired import Estimate
from eagle3.errors import InputError
from eagle3.serving.check.prompts import PromptSet
from eagle3.serving.compare import kept
from eagle3.serving.compare.jobs import find_jobs
from eagle3.serving.compare.sweep import setting_rows, settings_page, verdict
from eagle3.storage.records import read_sealed_json, write_sealed_json

TINY, PROMPTS = ASSETS / "tiny", ASSETS / "prompts"
T_OF_TWO = 12.7062047362  # Student's t of 95 %, one degree of freedom
LEFT_OUT = "left out: job 4 (no result: failed, or not finished), job 5 (no result: failed, or not finished)"
SETTINGS = ("optim.lr=0.0001", "optim.lr=0.03")
CHAINS = "compare.shapes=[{steps: 3, topk: 1, draft_tokens: null}, {steps: 1, topk: 1, draft_tokens: null}]"
ASK = (
    "action=compare", f"target.path={TINY}", f"prompts.path={PROMPTS}/heldout.jsonl", "limit=4", "max_new_tokens=16",
    CHAINS, "compare.samplings=[{temperature: 0}]",
)  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep as train.py -m leaves it: two settings x two seeds, and two jobs that failed."""
    folder, taught = tmp_path_factory.mktemp("sweep") / "losses", taught_head()
    for number, (setting, seed) in enumerate(product((*SETTINGS, "optim.lr=-1"), (0, 1))):
        job(folder, str(number), number, setting, f"seed={seed}", checkpoint=False, result=number < 4)
        if number < 4:
            noisy = copy.deepcopy(taught.head)
            generator = torch.Generator().manual_seed(number)
            noisy.lm_head.weight += 0.02 * number * torch.randn(noisy.lm_head.weight.shape, generator=generator)
            save_checkpoint(folder / str(number) / "checkpoints" / "best.ckpt", replace(taught, head=noisy))
    return folder


@pytest.fixture(scope="module")
def compared(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The sweep's table as a command leaves it, tracked by W&B without a network."""
    out = tmp_path_factory.mktemp("compared") / "out"
    tracked = ("logger=wandb", "logger.wandb.offline=true")
    done = run_script("serve", *ASK, f"sweep={trained}", f"hydra.run.dir={out}", *tracked)
    assert done.returncode == 0, done.stderr
    return out, done


@pytest.fixture
def again(trained: Path, compared: Any, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Compare the same sweep once more, in this process."""

    def call(*overrides: str, folder: Path = trained) -> dict[str, Any]:
        call_script("serve", *ASK, f"sweep={folder}", *overrides, output_dir=tmp_path / "again")
        return read_sealed_json(tmp_path / "again" / "compare.json", made_by="")

    return call


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_table_is_what_compare_json_says_of_each_seed(compared):
    out, done = compared
    found = read_sealed_json(out / "compare.json", made_by="")
    lines = [cells(line) for line in done.stdout.splitlines() if line.startswith("| greedy")]
    assert [line[1:4] for line in lines] == [
        [f"chain of {steps}", setting, "2"] for steps in (3, 1) for setting in SETTINGS
    ]
    for line in lines:
        rows = [
            row for row in found["rows"]
            if (row["source"], f"chain of {row['steps']}", row["head"]) == ("all", line[1], line[2])
        ]  # fmt: skip
        assert [row["seed"] for row in rows] == ["0", "1"]
        assert line[4:6] == in_words([row["accept_length"]["value"] for row in rows], "")
        is_first = line[2] == SETTINGS[0]
        assert line[6:] == ["", ""] if is_first else in_words([row["difference"]["value"] for row in rows], "+")
    for first, other in zip(found["rows"][::2], found["rows"][1::2], strict=True):
        assert (first["seed"], first["head"], other["head"]) == (other["seed"], *SETTINGS)
        gained = other["accept_length"]["value"] - first["accept_length"]["value"]
        assert first["difference"] is None and other["difference"]["value"] == pytest.approx(gained)
    assert len({row["difference"]["value"] for row in found["rows"][1::2]}) > 2  # the heads are not all alike


def in_words(values: list[float], sign: str) -> list[str]:
    """Mean and Student's interval of two values, calculated here."""
    mean, half = fmean(values), T_OF_TWO * stdev(values) / sqrt(2)
    if not half:  # the same number of accepted drafts by chance
        return [f"{mean:{sign}.3f}", ""]
    return [f"{mean:{sign}.3f}", f"[{mean - half:{sign}.3f}, {mean + half:{sign}.3f}]"]


def test_the_console_has_a_sentence_for_each_chain_and_the_files_the_sources(compared):
    out, done = compared
    pattern = (
        r"optim.lr=0.03 - optim.lr=0.0001: [+-]\d.\d{3}( \[.*\])? in a chain of \d, greedy, over 2 seeds: [a-z ,;]+"
    )
    said = [line for line in done.stdout.splitlines() if re.fullmatch(pattern, line)]
    assert len(said) == 2
    page = (out / "compare.md").read_text()
    assert page.startswith(done.stdout.rstrip("\n")) and LEFT_OUT in page
    assert [line for line in done.stderr.splitlines() if "job 4" in line] == [LEFT_OUT]
    found = read_sealed_json(out / "compare.json", made_by="")
    assert [*found["jobs"]] == ["0", "1", "2", "3"] == [*found["heads"]] and [*found["jobs_left_out"]] == ["4", "5"]
    sources = {row["source"] for row in found["rows"]} - {"all"}
    assert len(sources) > 1
    for source in sources:
        assert f"| {source} |" in page and f"| {source} |" not in done.stdout
    assert page.index("## Seed 0") < page.index("## Seed 1")


def test_wandb_has_the_same_numbers(compared, trained):
    out, _ = compared
    [file] = out.glob("wandb/offline-run-*/files/media/table/compare_*.table.json")
    table = json.loads(file.read_text())
    logged = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    made = read_sealed_json(out / "compare.json", made_by="")["settings"]
    assert len(logged) == len(made) == 4
    for row, expected in zip(logged, made, strict=True):
        assert (row["setting"], row["seeds"], row["verdict"]) == (expected["setting"], "0, 1", expected["verdict"])
        for key in ("accept_length", "difference"):
            for part in Estimate._fields:
                assert row[f"{key}.{part}"] == (expected[key] and expected[key][part])
    [record] = out.glob("wandb/offline-run-*/*.wandb")
    content = record.read_bytes()
    assert b"losses-compared" in content and b"git_revision" in content  # its name, and settings


def test_what_is_there_is_not_made_again(again, compared, monkeypatch):
    for module, name in ((commands, "write_checked"), (kept, "answers_at"), (kept, "measure_job")):
        monkeypatch.setattr(module, name, None)
    before = read_sealed_json(compared[0] / "compare.json", made_by="")
    found = again()
    assert [found[key] for key in ("settings", "rows")] == [before[key] for key in ("settings", "rows")]


def test_a_comparison_that_was_stopped_measures_what_is_missing(again, compared, trained, tmp_path, monkeypatch):
    folder = Path(shutil.copytree(trained, tmp_path / "losses"))
    shutil.rmtree(folder / "1" / "head")
    for job in "0123":
        shutil.rmtree(folder / job / "compared")
    measured: list[str] = []
    exported: list[str] = []
    measure_job, write_checked = kept.measure_job, commands.write_checked

    def measure(job: Any, *given: Any) -> Any:
        measured.append(job.name)
        if len(measured) == 3:
            raise KeyboardInterrupt
        return measure_job(job, *given)

    def write(trained: Any, head: Path, *given: Any, **options: Any) -> None:
        exported.append(head.parent.name)
        write_checked(trained, head, *given, **options)

    monkeypatch.setattr(kept, "measure_job", measure)
    monkeypatch.setattr(commands, "write_checked", write)
    with pytest.raises(SystemExit):
        again(folder=folder)
    assert again(folder=folder)["settings"] == read_sealed_json(compared[0] / "compare.json", made_by="")["settings"]
    assert (measured, exported) == (["0", "1", "2", "2", "3"], ["1"])


def test_other_questions_and_other_answers_are_measured_again(again, trained, monkeypatch):
    measured: list[str] = []
    measure_job = kept.measure_job
    monkeypatch.setattr(kept, "measure_job", lambda job, *rest: measured.append(job.name) or measure_job(job, *rest))
    assert {row["prompts"] for row in again("limit=2")["settings"]} == {2}
    assert measured == ["0", "1", "2", "3"]
    # As if another machine had given other answers while job 2 was measured.
    newest = max((trained / "2" / "compared").iterdir(), key=os.path.getmtime)
    stored = read_sealed_json(newest, made_by="")
    write_sealed_json(newest, stored | {"answers_sha256": "others"})
    again("limit=2")
    assert measured[4:] == ["2"]


def row(seed: str, head: str, value: float, difference: float | None) -> dict[str, Any]:
    way = {"sampling": "greedy", "temperature": 0.0, "top_p": 1.0, "top_k": 0, "steps": 3, "topk": 1, "draft_tokens": 4}
    estimate = {"standard_error": 0.1, "low": value - 0.2, "high": value + 0.2}
    against = difference if difference is None else {"value": difference, **estimate, "low": 0.1, "high": 0.3}
    length = {"value": value, **estimate}
    where = {"source": "all", "positions": "all", "conversations": 9, "prompts": 9}
    return {"seed": seed, **way, **where, "head": head, "accept_length": length, "difference": against}


@pytest.mark.parametrize(
    ("gains", "said"),
    [
        ([0.2, 0.21, 0.19], "b - a: +0.200 [+0.175, +0.225] in a chain of 3, greedy, over 3 seeds: longer"),
        ([-0.2, -0.21, -0.19], "b - a: -0.200 [-0.225, -0.175] in a chain of 3, greedy, over 3 seeds: shorter"),
        ([0.2, -0.2], "b - a: +0.000 [-2.541, +2.541] in a chain of 3, greedy, over 2 seeds: not separated"),
        (
            [0.2, 0.2],
            "b - a: +0.200 in a chain of 3, greedy, over 2 seeds: "
            "no interval, the difference is the same in each seed; compare on more prompts",
        ),
        ([0.2], "b - a: +0.200 [+0.100, +0.300] in a chain of 3, greedy, over one seed, 9 conversations: longer"),
    ],
)
def test_a_verdict_says_what_the_interval_says(gains, said):
    rows = [row(str(seed), "a", 2.0, None) for seed in range(len(gains))]
    rows += [row(str(seed), "b", 2.0 + gain, gain) for seed, gain in enumerate(gains)]
    assert [each["verdict"] for each in setting_rows(rows)] == [None, said]
    prompts = PromptSet.of("here", "first", [[[1]]] * 9, Counter(), ["here"] * 9)
    assert said in settings_page(setting_rows(rows), prompts)


def test_settings_without_a_seed_in_common_have_no_difference():
    _, other = setting_rows([row("0", "a", 2.0, None), row("1", "b", 2.5, None)])
    assert (other["pairs"], other["difference"]) == (0, None)
    assert verdict(other, "a") == "b - a in a chain of 3, greedy: no seed in common"


# --- jobs -------------------------------------------------------------------------------------------------------------


def job(folder: Path, name: str, number: int, *settings: str, checkpoint: bool = True, result: bool = True) -> None:
    hydra, checkpoints = folder / name / ".hydra", folder / name / "checkpoints"
    hydra.mkdir(parents=True)
    checkpoints.mkdir()
    (hydra / "overrides.yaml").write_text("".join(f"- {each}\n" for each in settings))
    (hydra / "job").write_text(str(number))
    if checkpoint:
        (checkpoints / "best.ckpt").touch()
    if result:
        told = {"metric": "m", "mode": "max", "score": 1.5, "checkpoint": "elsewhere/best.ckpt", "steps": 1}
        write_sealed_json(folder / name / "result.json", told)


def test_jobs_are_in_the_order_of_the_sweep_and_what_lacks_a_head_is_named(tmp_path, caplog):
    for number in range(12):
        job(tmp_path, str(number), number, "data.path=x", f"optim.lr={number // 2}", f"seed={number % 2}")
    job(tmp_path, "12", 12, "data.path=x", "optim.lr=0", "seed=1")
    job(tmp_path, "13", 13, "data.path=x", "optim.lr=9", "seed=0", checkpoint=False)
    job(tmp_path, "14", 14, "data.path=x", "optim.lr=9", "seed=1", result=False)
    jobs = find_jobs(tmp_path)
    assert [each.name for each in jobs.finished] == [str(number) for number in range(12)]
    assert [each.setting for each in jobs.finished[:3]] == ["optim.lr=0", "optim.lr=0", "optim.lr=1"]
    assert jobs.has_seeds and [each.seed for each in jobs.finished[:3]] == ["0", "1", "0"]
    line = "left out: job 12 (as job 1), job 13 (no checkpoint), job 14 (no result: failed, or not finished)"
    assert caplog.messages == [line]


def test_a_folder_without_a_finished_job_is_one_line(tmp_path):
    with pytest.raises(InputError, match=f"sweep={tmp_path} has no jobs of a sweep; give the folder of one"):
        find_jobs(tmp_path)
    job(tmp_path, "0", 0, "seed=0", result=False)
    with pytest.raises(InputError, match="has no finished job; continue it with ckpt_path=auto; left out: job 0"):
        find_jobs(tmp_path)


def test_intervals_over_seeds_name_the_extra_that_they_need(tmp_path, monkeypatch):
    for number in range(2):
        job(tmp_path, str(number), number, f"seed={number}")
    run = serve_run("compare", f"sweep={tmp_path}", "heads=null")
    assert commands.sweep_jobs(run) == find_jobs(tmp_path)
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(InputError, match=r"over the seeds of a sweep needs the package scipy; .*'\.\[bench\]'"):
        commands.sweep_jobs(run)
