"""Processes, limits, killed runs and the traffic mix: how the rows are scanned must never show in the prompts."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf
from prompt_stage import OUTPUTS, chat, reasons, some_rows, texts, write
from stores import CONF, ROOT

from eagle3.errors import InputError
from eagle3.prompts import chunks, scan
from eagle3.prompts.reading.formats import cut

# Processes


def test_neither_processes_nor_chunks_nor_row_groups_show_in_the_output(prepare, monkeypatch):
    prepare(some_rows(40))
    expected = prepare.outputs()
    monkeypatch.setattr(chunks, "GROUP_ROWS", 7)
    monkeypatch.setattr(chunks, "GROUP_BYTES", 300)
    for settings in ({}, {"chunk_mb": 0.0005, "processes": 2}, {"chunk_mb": 0.00005}):
        prepare.again(**settings)
        assert prepare.outputs() == expected
    assert sorted(file.name for file in prepare.folder.iterdir()) == sorted(OUTPUTS)
    assert len({reject["line"] for reject in prepare.rejects()}) == len(prepare.rejects()) > 5


# Limits


def test_a_limit_is_met_exactly_and_stops_the_reading(prepare):
    rows = [chat(f"q {number // 2}", id=number) for number in range(200)]  # half of them are duplicates
    settings = {"limit": 30, "chunk_mb": 0.001}
    ledger = prepare(rows, **settings)
    assert texts(prepare) == [f"q {number}" for number in range(30)]
    assert 60 <= ledger["rows"] < 150 and ledger["rows"] == 30 + len(prepare.rejects())
    assert prepare(rows[:40], **settings)["prompts"] == 20


def test_a_limit_over_several_sources_keeps_the_same_prompts_whatever_the_chunks(prepare, tmp_path):
    first = [*(chat("the very same question", id=number) for number in range(60)), *unlike("alpha", 80)]
    paths = [write(tmp_path / "a.jsonl", first), write(tmp_path / "b.jsonl", unlike("beta", 80))]
    for chunk_mb in (0.002, 8):
        ledger = prepare(sources=[*map(str, paths)], limit=50, chunk_mb=chunk_mb)
        assert [source["prompts"] for source in ledger["sources"].values()] == [50, 0]
        (prepare.folder / "ledger.json").unlink()


def unlike(word: str, count: int) -> list[dict]:
    return [chat(f"{word} {number} {number * 7919} {number * 31}", id=f"{word}{number}") for number in range(count)]


def test_with_a_limit_for_each_source_every_source_is_read_as_far_as_needed(prepare, tmp_path):
    entries = []
    for name in "ab":
        rows = [chat(f"{name} {number // 3}") for number in range(300)]
        entries.append({"path": str(write(tmp_path / f"{name}.jsonl", rows)), "limit": 20})
    ledger = prepare(sources=entries, chunk_mb=0.001)
    assert [source["prompts"] for source in ledger["sources"].values()] == [20, 20]
    assert all(source["rows"] < 200 for source in ledger["sources"].values())


# Going on


SCRIPT = """
import sys, time
sys.path.insert(0, {tests!r})
from pathlib import Path
from prompt_stage import prepared
from eagle3.prompts import scan
wait = scan.Scanner.scan
def slow(self, task, path):
    time.sleep(0.05)
    wait(self, task, path)
scan.Scanner.scan = slow
prepared(Path({out!r}), path={path!r}, chunk_mb=0.0005, processes=2, duplicates={{"near": False}})
"""


@pytest.mark.slow
def test_a_killed_run_continues_and_ends_with_the_same_bytes(prepare, tmp_path, monkeypatch):
    prepare(some_rows(150), chunk_mb=0.0005)
    expected, out, path = prepare.outputs(), tmp_path / "killed", str(tmp_path / "chats.jsonl")
    script = SCRIPT.format(tests=str(ROOT / "tests"), out=str(out), path=path)
    run = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL, start_new_session=True)
    while len(finished := finished_chunks(out / "prompts")) < 5:
        assert run.poll() is None
        time.sleep(0.02)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    prepare.out_dir, prepare.folder = out, out / "prompts"
    assert not (prepare.folder / "prompts.jsonl").exists()
    scanned, scan_chunk = [], scan.Scanner.scan
    monkeypatch.setattr(scan.Scanner, "scan", lambda *args: scanned.append(args) or scan_chunk(*args))
    prepare(path=path, chunk_mb=0.0005)
    assert prepare.outputs() == expected
    assert len(scanned) <= len(cut(path, 500)) - len(finished)
    assert not (prepare.folder / ".work").exists()


def finished_chunks(folder: Path) -> list[Path]:
    return [*(folder / ".work" / "chunks").glob("[!.]*.parquet")]


def test_what_a_stopped_run_left_is_not_used_after_a_change(prepare, tmp_path):
    bad, rows = damaged_parquet(tmp_path / "bad.parquet"), tmp_path / "rows.jsonl"

    def stopped() -> None:
        with pytest.raises(InputError, match="damaged"):
            prepare(sources=[{"path": str(rows)}, {"path": str(bad)}])
        assert len(finished_chunks(prepare.folder)) == 1

    write(rows, [chat("a"), chat("b", license="ISC")])
    stopped()
    write(rows, [chat("c"), chat("d", license="ISC")])
    prepare(sources=[{"path": str(rows)}])
    assert texts(prepare) == ["c", "d"]
    stopped()
    prepare(sources=[{"path": str(rows)}], licenses={"allowed": ["MIT"]})
    assert reasons(prepare) == ["license not allowed: ISC"]
    write(rows, [chat("e", "answer")])
    stopped()
    prepare(sources=[{"path": str(rows)}], keep_answers=True)
    assert [len(prompt["messages"]) for prompt in prepare.prompts()] == [2]


def damaged_parquet(path: Path) -> Path:
    """One whose list of row groups can be read, but not the rows."""
    pq.write_table(pa.table({"prompt": ["a" * 500]}), path, compression="NONE", write_statistics=False)
    path.write_bytes(path.read_bytes().replace(b"a" * 500, b"\xff" * 500, 1))
    return path


def test_a_worker_that_is_killed_ends_the_run_with_an_error(prepare, tmp_path):
    class Killer:
        name = "killer"

        def __call__(self, prompt):
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eagle3.prompts.rules.Rules.checks", lambda self, source: [Killer()])
        with pytest.raises(InputError, match=r"a process was killed.*prompts\.processes=1"):
            prepare([chat(f"q {number}") for number in range(20)], processes=2, chunk_mb=0.0001)


# The traffic mix


def test_the_mix_is_drawn_from_what_passed_and_reported(prepare, tmp_path):
    rows = [chat(f"q {number}", *(["x", "more"] if number >= 90 else [])) for number in range(100)]
    sample = write(tmp_path / "sample.jsonl", [chat("one"), chat("two", "x", "three")])
    mix = traffic_settings(sample=str(sample), size=16)
    ledger = prepare([*rows, chat("Q 0")], traffic=mix, chunk_mb=0.001)
    turns = [len(prompt["messages"]) for prompt in prepare.prompts()]
    assert (turns.count(1), turns.count(2)) == (8, 8)
    assert ledger["sources"]["chats"]["rejected"] == {"not drawn for the traffic mix": 84, "exact duplicate": 1}
    assert ledger["traffic"]["features"]["turns"]["distance_after"] == 0
    assert "turns: distance 0.400 → 0.000" in (prepare.folder / "report.md").read_text()
    for turns in (1, 2):  # a changed sample draws again
        write(sample, [chat("one", *(["x", "more"] * (turns - 1)))])
        prepare(rows, traffic=traffic_settings(sample=str(sample), size=5))
        assert {len(prompt["messages"]) for prompt in prepare.prompts()} == {turns}
    tools = [{"type": "function", "function": {"name": "f"}}]  # in a sample, also where rows with tools are refused
    write(sample, [chat("one"), chat("two"), chat("three", tools=tools)])
    mixed = prepare(rows, traffic=traffic_settings(sample=str(sample), size=3))["traffic"]["features"]
    assert mixed["tools"]["target"] == [0.666667, 0.333333]


def test_prompts_of_one_cell_are_drawn_at_random_by_the_seed(prepare, tmp_path):
    write(tmp_path / "chats.jsonl", [chat(f"question {number}", id=number) for number in range(300)])
    sample = str(write(tmp_path / "sample.jsonl", [chat("question 7")]))
    draws = []
    for seed, processes in ((0, 1), (0, 2), (1, 1)):
        mix = traffic_settings(sample=sample, size=100, seed=seed, bins={"turns": [1, 2]}, strata=["turns"])
        prepare.again(traffic=mix, processes=processes, chunk_mb=0.002)
        draws.append([int(prompt["id"]) for prompt in prepare.prompts()])
    assert draws[0] == draws[1] != draws[2]
    assert all(len(draw) == 100 and 120 < sum(draw) / 100 < 180 for draw in draws)


def traffic_settings(**changes) -> dict:
    settings = OmegaConf.to_container(OmegaConf.load(CONF / "prompts" / "traffic" / "production.yaml"))
    assert isinstance(settings, dict)
    return {**settings, **changes}
