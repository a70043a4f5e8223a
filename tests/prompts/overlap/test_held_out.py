"""The split of the prompts: one command makes both sides, and similar prompts are on one of them."""

import json
import random
from itertools import product
from pathlib import Path

import pytest
from prompt_stage import OUTPUTS, Prepare, chat, reasons
from similar_texts import LONG, VOCABULARY, asked, set_of_runs, texts_with_copies

from eagle3.errors import InputError
from eagle3.storage.files import read_jsonl

THOROUGH = {"bands": 30, "band_rows": 1, "comparisons": 600}


@pytest.fixture
def prepare(tmp_path: Path) -> Prepare:
    return Prepare(tmp_path, near=True)


def questions(prepare: Prepare, *, held_out: bool = False) -> list[str]:
    folder = prepare.out_dir / "held_out" / "prompts" if held_out else prepare.folder
    return [prompt["messages"][-1]["content"] for prompt in read_jsonl(folder / "prompts.jsonl")]


def similar(one: str, other: str) -> bool:
    runs, others = set_of_runs(one), set_of_runs(other)
    return len(runs & others) / len(runs | others) >= 0.8


def test_a_share_or_a_number_of_the_prompts_is_held_out_and_both_sides_account_for_every_row(prepare):
    texts = [f"{number} {VOCABULARY[number]}" for number in range(100)]
    rows = [*(chat(text) for text in texts), chat(texts[0]), "broken"]
    for held_out, number in ((0.1, 10), (25, 25), (0.001, 1)):
        ledger = prepare(rows, held_out=held_out)
        training, measured = questions(prepare), questions(prepare, held_out=True)
        assert len(measured) == number and sorted([*training, *measured]) == sorted(texts)
        folder = prepare.out_dir / "held_out" / "prompts"
        other = json.loads((folder / "ledger.json").read_text())
        refused = {"exact duplicate": 1, "not a JSON object": 1}
        assert ledger["sources"]["chats"]["rejected"] == {"held out": number, **refused}
        assert other["sources"]["chats"]["rejected"] == {"not held out": 100 - number, **refused}
        assert all((folder / name).exists() for name in OUTPUTS)
        assert f"{number} of 102 rows are prompts" in (folder / "report.md").read_text()
    prepare([chat(text) for text in texts], held_out=10, limit=20)
    assert sorted(questions(prepare) + questions(prepare, held_out=True)) == sorted(texts[:20])


def test_similar_questions_are_on_one_side_whatever_their_mode_and_their_answers(prepare):
    texts = texts_with_copies(150, seed=7)
    rows = [chat(text, f"answer {number}") for number, text in enumerate(texts)]
    rows += [asked(f"You are person {number}.", LONG) for number in range(9)]
    for row in rows[150:]:
        row["messages"].append({"role": "assistant", "content": "x"})
    # With the answers kept, similar questions with other answers are no duplicates.
    assert prepare(rows, held_out=0.4, duplicates=THOROUGH, keep_answers=True)["prompts"] > 70
    sides = []
    for folder in (prepare.folder, prepare.out_dir / "held_out" / "prompts"):
        prompts = read_jsonl(folder / "prompts.jsonl")
        sides.append({turn["content"] for each in prompts for turn in each["messages"] if turn["role"] == "user"})
    assert not any(similar(one, other) for one, other in product(*sides))
    assert any(similar(one, other) for one, other in product(sides[1], sides[1]) if one != other)


def test_requests_of_one_conversation_are_on_one_side(prepare):
    rows, rng = [], random.Random(3)
    for session in range(30):
        turns = ["Hello", *(" ".join(rng.choices(VOCABULARY, k=20)) for _ in range(3))]
        asked_so_far = [turns[session % 2 : end] for end in range(2, 5)]  # half of them begin with a greeting
        rows += [chat(*(text for turn in each for text in (turn, "x"))) for each in asked_so_far]
    prepare(rows, held_out=15)
    sides = []
    for folder in (prepare.folder, prepare.out_dir / "held_out" / "prompts"):
        prompts = read_jsonl(folder / "prompts.jsonl")
        sides.append({turn["content"] for each in prompts for turn in each["messages"]} - {"Hello"})
    assert sides[0] and sides[1] and not sides[0] & sides[1]


def test_the_split_depends_on_texts_and_seed_alone(prepare, tmp_path):
    rows = [chat(f"{number} {VOCABULARY[number]}") for number in range(60)]
    prepare(rows, held_out=0.2)
    expected = prepare.outputs(), questions(prepare, held_out=True)
    (prepare.out_dir / "held_out" / "prompts" / "prompts.jsonl").unlink()  # then both are made again
    prepare(rows, held_out=0.2, processes=2, chunk_mb=0.001)
    assert (prepare.outputs() | {"ledger.json": b""}, questions(prepare, held_out=True)) == (
        expected[0] | {"ledger.json": b""}, expected[1],
    )  # fmt: skip
    other = Prepare(tmp_path / "other")
    other(rows[::-1], held_out=0.2)
    assert sorted(questions(other, held_out=True)) == sorted(expected[1])
    other(rows[::-1], held_out=0.2, held_out_seed=1)
    assert sorted(questions(other, held_out=True)) != sorted(expected[1])


def test_few_prompts_to_train_on_are_a_warning_and_none_an_error(prepare, caplog):
    rows = [chat(f"{number} {VOCABULARY[number]}") for number in range(10)]
    prepare(rows, held_out=5)
    assert "prompts.held_out" not in caplog.text
    prepare(rows, held_out=6)
    assert "prompts.held_out: 6 prompts are held out and only 4 are left" in caplog.text
    before = prepare.outputs()
    with pytest.raises(InputError, match=r"prompts\.held_out=10 .*leave 0 to train on"):
        prepare(rows, held_out=10)
    with pytest.raises(InputError, match=r"prompts\.held_out=null would train on the prompts that .* held out"):
        prepare(rows)
    assert prepare.outputs() == before
    same = [asked(f"person {number}", LONG) for number in range(10)]
    with pytest.raises(InputError, match=r"prompts\.held_out=5 would hold out 0 of 10 prompts, similar ones together"):
        prepare(same, held_out=5)
    caplog.clear()
    prepare([*same, *rows[:3]], held_out=5)
    assert len(questions(prepare, held_out=True)) == 3
    assert "prompts.held_out: 3 instead of 5 prompts, because similar ones stay together" in caplog.text


def test_the_held_out_prompts_are_a_set_that_other_runs_can_name(prepare, tmp_path):
    rows = [chat(f"{number} {VOCABULARY[number]}") for number in range(20)]
    prepare(rows, held_out=5)
    later = Prepare(tmp_path / "later")
    new, held_out = chat("Something new"), f"known: {prepare.out_dir / 'held_out'} has it"
    later([*rows, new], duplicates={"known": [str(prepare.out_dir / "held_out")]})
    assert sorted(questions(later)) == sorted([*questions(prepare), "Something new"])
    assert reasons(later) == [held_out] * 5
    later([*rows, new], duplicates={"known": [str(prepare.out_dir)]})  # which has held some out
    assert questions(later) == ["Something new"]
    assert sorted(reasons(later)) == sorted([f"known: {prepare.out_dir} has it"] * 15 + [held_out] * 5)
