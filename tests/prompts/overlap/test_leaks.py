"""Prompts that overlap with benchmarks, against a plain reference."""

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prompt_stage import chat, reasons, write

from eagle3.errors import InputError
from eagle3.prompts.overlap.leaks import Benchmark, LeakCheck
from eagle3.prompts.overlap.words import words
from eagle3.prompts.reading.prompt import Prompt


def spell(first: int, last: int) -> str:
    return " ".join(f"w{number}" for number in range(first, last))


def named(tmp_path: Path, name: str, *texts: str) -> str:
    return str(write(tmp_path / f"{name}.jsonl", [{"question_id": 0, "turns": list(texts)}]))


def test_thirteen_words_in_a_row_are_dropped_and_twelve_pass(prepare, tmp_path):
    benchmarks = [named(tmp_path, "one", spell(0, 30)), named(tmp_path, "two", spell(100, 130))]
    texts = f"please: {spell(3, 16)} x", f"please: {spell(3, 15)} y", f"{spell(110, 122)} z", f"{spell(110, 123)} z"
    rows = [chat(text) for text in texts]
    ledger = prepare(rows, decontamination={"benchmarks": benchmarks}, duplicates={"near": False})
    assert reasons(prepare) == ["leak: one", "leak: two"]
    assert ledger["leaks"] == {key: {"texts": 1, "answers": 0, "unread": 0, "dropped": 1} for key in ("one", "two")}
    assert "| one | 1 | 0 | 1 |" in (prepare.folder / "report.md").read_text()


def test_case_punctuation_and_composition_do_not_hide_a_leak(prepare, tmp_path):
    hidden = ", ".join(spell(0, 13).upper().split())
    accents = "\u00c9cole caf\u00e9 " + spell(40, 51)
    benchmark = {"benchmarks": [named(tmp_path, "one", spell(0, 13), accents)]}
    rows = [
        chat("fine"),
        chat(f"Q:\n{hidden}?"),
        chat("\ufe0e".join(hidden)),
        chat("E\u0301co\u200ble CAFE\u0301 " + spell(40, 51).replace("4", "\uff14")),
    ]
    prepare(rows, decontamination=benchmark)
    assert reasons(prepare) == ["leak: one"] * 3


def test_a_short_text_leaks_as_a_whole_turn_only(prepare, tmp_path):
    rows = [chat("Now say WHY."), chat("please now say why"), chat("first", "", "now say why")]
    prepare(rows, decontamination={"benchmarks": [named(tmp_path, "one", "Now, say why?")]})
    assert [reject["line"] for reject in prepare.rejects()] == [1, 3]


def test_system_turns_and_kept_answers_can_leak(prepare, tmp_path):
    system = {"role": "system", "content": spell(0, 20)}
    asked = {**chat(), "messages": [system, {"role": "user", "content": "a"}, {"role": "assistant", "content": "x"}]}
    rows = [asked, chat("b", spell(0, 20)), chat("c", "x")]
    prepare(rows, decontamination={"benchmarks": [named(tmp_path, "one", spell(0, 20))]}, keep_answers=True)
    assert reasons(prepare) == ["leak: one", "leak: one"]


def test_every_file_shape_of_a_source_can_be_a_benchmark(prepare, tmp_path):
    folder = tmp_path / "suite"
    folder.mkdir()
    write(folder / "test.jsonl", [chat(spell(0, 20))])
    write(folder / "train.jsonl", [chat(spell(50, 70))])
    entries = [str(folder), {"path": str(folder), "name": "other", "split": "train"}]
    rows = [chat("a"), chat(spell(0, 20)), chat(spell(50, 70))]
    prepare(rows, decontamination={"benchmarks": entries})
    assert reasons(prepare) == ["leak: suite", "leak: other"]
    write(folder / "test.jsonl", [chat("changed")])  # then the prompts are made again
    prepare(rows, decontamination={"benchmarks": entries})
    assert reasons(prepare) == ["leak: other"]


def test_rows_of_a_benchmark_that_cannot_be_read_are_counted_and_said(prepare, tmp_path, caplog):
    unread = [{"messages": [{"role": "narrator", "content": "b"}]}, "{"]
    path = write(tmp_path / "one.jsonl", [{"prompt": "a"}, "", *unread])  # a blank line is no row
    ledger = prepare([chat("c")], decontamination={"benchmarks": [str(path)]})
    assert ledger["leaks"]["one"]["unread"] == 2
    assert "2 of 3 rows cannot be read as prompts (unknown role: 1, not a JSON object: 1)" in caplog.text
    assert "**2 rows of one could not be read**" in (prepare.folder / "report.md").read_text()


def test_a_text_of_one_word_leaks_and_one_without_words_never():
    check = LeakCheck([Benchmark("one", [], ["Why?", "???", "a b c"], 0)], dropped_words=3)

    def reason(text: str) -> str | None:
        return check(Prompt(id="", source="", license=None, messages=[{"role": "user", "content": text}])).reason

    assert reason("WHY!") == reason("x a b c") == "leak: one"
    assert reason("but why") is reason("b a") is None
    # Hashes below and above all of the benchmark's.
    assert {reason(f"x{number} y z") for number in range(50)} == {reason("!!!")} == {None}


@pytest.mark.parametrize("n", [2, 5])
def test_the_check_agrees_with_comparing_every_run_of_words(n):
    rng = random.Random(n)
    letters = "abcdefgh"[: 16 // n]
    texts = [" ".join(rng.choices(letters, k=rng.randint(n, 12))) for _ in range(12)]
    check = LeakCheck([Benchmark(str(index), [], [text], 0) for index, text in enumerate(texts)], dropped_words=n)

    def runs(text: str) -> set[tuple[str, ...]]:
        return {tuple(words(text)[start : start + n]) for start in range(len(words(text)) - n + 1)}

    outcomes = set()
    for _ in range(200):
        text = " ".join(rng.choices(letters, k=rng.randint(1, 6)))
        owner = next((index for index, other in enumerate(texts) if runs(text) & runs(other)), None)
        prompt = Prompt(id="", source="", license=None, messages=[{"role": "user", "content": text}])
        assert check(prompt).reason == (None if owner is None else f"leak: {owner}")
        outcomes.add(owner is None)
    assert outcomes == {True, False}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (["/no/such.jsonl"], r"prompts\.decontamination\.benchmarks\[0\]\.path=/no/such\.jsonl does not exist"),
        (["ONE", "ONE"], r"prompts\.decontamination\.benchmarks\[1\]\.name=one is taken"),
        (["EMPTY"], r"prompts\.decontamination\.benchmarks\[0\]\.path=.*empty\.jsonl has no prompt"),
    ],
)
def test_a_wrong_setting_is_named(prepare, tmp_path, entries, message):
    files = {"ONE": named(tmp_path, "one", spell(0, 20)), "EMPTY": str(write(tmp_path / "empty.jsonl", ["x"]))}
    with pytest.raises(InputError, match=message):
        prepare([chat("a")], decontamination={"benchmarks": [files.get(entry, entry) for entry in entries]})


def test_benchmarks_are_read_from_their_published_columns_with_their_answers(prepare, tmp_path, caplog):
    """The columns of GSM8K, HumanEval and MMLU on the Hub."""
    folder = tmp_path / "benchmarks"
    (folder / "mmlu" / "data").mkdir(parents=True)
    gsm8k = {"question": [spell(0, 20)], "answer": [f"{spell(100, 120)} #### 42"]}
    pq.write_table(pa.table(gsm8k), folder / "gsm8k.parquet")
    humaneval = {"task_id": "HumanEval/0", "prompt": spell(200, 220), "canonical_solution": spell(300, 320)}
    write(folder / "humaneval.jsonl", [{**humaneval, "test": "assert True"}])
    mmlu = {"question": ["Why so?"], "choices": [["a", "b"]], "answer": [1]}
    pq.write_table(pa.table(mmlu), folder / "mmlu" / "data" / "test-00000-of-00001.parquet")
    texts = [spell(3, 18), spell(103, 118), spell(201, 218), spell(301, 318), "why so", "42", "please why so"]
    leaks = {"benchmarks": [str(folder / name) for name in ("gsm8k.parquet", "humaneval.jsonl", "mmlu")]}
    ledger = prepare([chat(text) for text in texts], decontamination=leaks, duplicates={"near": False})
    assert reasons(prepare) == [f"leak: {name}" for name in ("gsm8k", "gsm8k", "humaneval", "humaneval", "mmlu")]
    assert {name: leak["answers"] for name, leak in ledger["leaks"].items()} == {"gsm8k": 1, "humaneval": 1, "mmlu": 0}
    assert "cannot be read" not in caplog.text
