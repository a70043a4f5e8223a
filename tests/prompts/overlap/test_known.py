"""Prompts that earlier runs have kept are left out of later ones, and of no run twice."""

from pathlib import Path

import pytest
from prompt_stage import Prepare, chat, reasons

from eagle3.errors import InputError

FIRST = [chat("What is a monad?", "x"), chat("Sort a list, please", "x"), chat("First", "an answer", "Then this", "x")]
SECOND = [
    chat("what is a MONAD", "y"), chat("Sort a tuple, please", "y"), chat("First", "another answer", "then this"),
    chat("First"), chat("Something new"),
]  # fmt: skip


def run(folder: Path) -> Prepare:
    folder.mkdir()
    return Prepare(folder)


def test_what_an_earlier_run_has_kept_is_left_out_and_counted(tmp_path: Path) -> None:
    prepare, first = run(tmp_path / "later"), run(tmp_path / "first")
    first(FIRST)
    known = {"known": [str(first.out_dir)], "near": False}
    prepare(SECOND, duplicates=known)
    kept = [prompt["messages"][0]["content"] for prompt in prepare.prompts()]
    assert kept == ["Sort a tuple, please", "First", "Something new"]
    assert reasons(prepare) == [f"known: {first.out_dir} has it"] * 2
    both = {"known": [str(first.out_dir), str(prepare.out_dir)], "near": False}
    third = run(tmp_path / "third")
    third([*SECOND, chat("Newer still")], duplicates=both)
    assert [prompt["messages"][0]["content"] for prompt in third.prompts()] == ["Newer still"]


def test_prompts_are_made_again_when_the_earlier_run_has_changed(tmp_path: Path) -> None:
    prepare, first = run(tmp_path / "later"), run(tmp_path / "first")
    first(FIRST[:1])
    known = {"known": [str(first.out_dir)], "near": False}
    prepare(SECOND, duplicates=known)
    assert len(prepare.prompts()) == 4
    first(FIRST)
    prepare(SECOND, duplicates=known)
    assert len(prepare.prompts()) == 3


def test_a_folder_without_prompts_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"duplicates\.known=\['/nowhere'\]: /nowhere/prompts/prompts\.jsonl does not"):
        run(tmp_path / "later")(SECOND, duplicates={"known": ["/nowhere"]})
