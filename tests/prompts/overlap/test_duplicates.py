"""Exact and near duplicates against a brute-force reference; what counts as the same text."""

import random
from pathlib import Path
from string import ascii_lowercase

import numpy as np
import pytest
from prompt_stage import Prepare, chat, default_settings, reasons, users, write
from prompt_stage import texts as kept_texts
from similar_texts import LONG, VOCABULARY, asked, kept_by_brute_force, texts_with_copies

from eagle3.errors import InputError
from eagle3.prompts import selection
from eagle3.prompts.overlap.duplicates import Signature, Signer
from eagle3.prompts.reading.prompt import Prompt
from eagle3.settings.prompts import DuplicateSettings


@pytest.fixture
def prepare(tmp_path: Path) -> Prepare:
    return Prepare(tmp_path, near=True)


@pytest.mark.parametrize("threshold", [0.6, 0.8])
def test_what_is_kept_is_what_comparing_every_pair_keeps(prepare, threshold):
    texts = texts_with_copies(300, seed=1)
    # One row a band finds every pair that has anything in common: the result is exact, not likely.
    prepare(
        [chat(text) for text in texts],
        duplicates={"threshold": threshold, "bands": 30, "band_rows": 1, "comparisons": 600},
    )
    assert kept_texts(prepare) == kept_by_brute_force(texts, threshold)
    assert {"exact duplicate", "near duplicate"} == set(reasons(prepare))


@pytest.mark.slow
def test_the_default_bands_find_nearly_all_pairs_above_the_threshold(prepare):
    texts = texts_with_copies(800, seed=2)
    prepare([chat(text) for text in texts])
    kept, expected = {*kept_texts(prepare)}, kept_by_brute_force(texts, 0.8)
    assert len(kept) == pytest.approx(len(expected), rel=0.02)
    assert len(texts) - len(expected) > 150


@pytest.mark.slow
def test_near_copies_do_not_depend_on_processes_chunks_or_batches(prepare, monkeypatch):
    rows = [chat(text) for text in texts_with_copies(300, seed=3)]
    settings = {"threshold": 0.6, "bands": 40, "band_rows": 2, "comparisons": 600}
    prepare(rows, duplicates=settings)
    expected = prepare.prompts(), prepare.rejects()
    assert reasons(prepare).count("near duplicate") > 50
    (prepare.folder / "ledger.json").unlink()
    monkeypatch.setattr(selection, "BATCH", 10_000)  # bytes: some ten pairs
    prepare(rows, duplicates=settings, processes=2, chunk_mb=0.02)
    assert (prepare.prompts(), prepare.rejects()) == expected


@pytest.mark.slow
def test_long_prompts_of_one_template_are_compared_within_the_memory_limit(prepare, monkeypatch):
    monkeypatch.setattr(selection, "MEMORY", "100MB")
    monkeypatch.setattr(selection, "BATCH", 6_000_000)
    rng = random.Random(4)
    template = ["".join(rng.choices(ascii_lowercase, k=6)) for _ in range(3900)]
    texts = [" ".join([*template, *rng.choices(VOCABULARY, k=100)]) for _ in range(60)]
    prepare([chat(text) for text in texts])
    assert kept_texts(prepare) == texts[:1]


def signed(text: str, **settings: int) -> Signature:
    signer = Signer(DuplicateSettings(**default_settings()["duplicates"] | settings))
    return signer(Prompt(id="", source="", license=None, messages=users(text)))


def test_as_many_bands_of_one_row_agree_as_texts_have_words_in_common():
    count = 9000  # of words: several blocks

    def bands(first: int, last: int) -> np.ndarray:
        text = " ".join(f"w{number}" for number in range(first, last))
        return np.array(signed(text, shingle_words=1, bands=400, band_rows=1).bands)

    whole = bands(0, count)
    assert (whole == bands(count // 3, count)).mean() == pytest.approx(2 / 3, abs=0.08)
    assert not (whole == bands(count, 2 * count)).any()


def test_prompts_of_one_template_are_compared_with_a_few_whatever_their_number(prepare):
    frame = " ".join(VOCABULARY[:60])
    rows = [chat(f"{frame} {' '.join(random.Random(number).choices(VOCABULARY, k=20))}") for number in range(300)]
    settings = {"threshold": 0.99, "bands": 40, "band_rows": 1, "comparisons": 3}
    assert prepare([*rows, *rows[::7]], duplicates=settings)["prompts"] == 300
    assert set(reasons(prepare)) == {"exact duplicate"}


SAME = [
    ("What is a  monad?", "what is a\nMONAD"), ("Stop!Now!!", "stop now"), ("Is it so ?!", "is it so"),
    ("क्या है।", "क्या है?"), ("¿Qué es «eso»?", "qué es eso"), ("ｶﾞ４", "ガ4"), ("كتــاب", "كتاب"),
    ("“Quote” it…", "'quote' it"), ("机器学习是什么?", "机器学习是什么"),
    ("caf\u00e9 a\u200bb", "cafe\u0301 ab"), ("\u202aI \u2764\ufe0f it\u202c", "I \u2764 it"),
]  # fmt: skip
OTHER = [
    ("What is 3 + 4?", "What is 3 - 4?"), ("2 ** 3", "2 * 3"), ("fix x != 3", "fix x = 3"), ("fix x := 3", "fix x = 3"),
    ("if (!ready)", "if (ready)"), ("3.14", "314"), ("???", "!!!"), ("今天天气怎么样", "明天天气怎么样"),
    ("What does `a.b.is_complete` do?", "What does `a.b.is_closed` do?"), ("x\u00b2", "x2"),
    ("my r\u00e9sum\u00e9", "my resume"), ("in Maßen", "in Massen"), ("कम क्या है", "काम क्या है"), ("f(x)³", "f(x)3"),
    ("ما كَتَبَ", "ما كُتُب"), ("ที่ไหนใกล้", "ที่ไหนไกล"), ("Bán ở đâu", "Bạn ở đâu"),
]  # fmt: skip


def test_case_spaces_punctuation_and_composition_do_not_make_another_prompt_and_operators_do():
    def are_same(pair: tuple[str, str]) -> bool:
        one, other = map(signed, pair)
        return one.text_hash == other.text_hash

    assert [pair for pair in SAME if not are_same(pair)] == []
    assert [pair for pair in OTHER if are_same(pair)] == []


def test_a_shared_system_turn_neither_makes_nor_hides_duplicates(prepare):
    policy = " ".join(VOCABULARY)
    texts = texts_with_copies(120, seed=5)
    settings = {"bands": 30, "band_rows": 1, "comparisons": 600}
    prepare([asked(policy, text) for text in texts], duplicates=settings)
    assert [prompt["messages"][1]["content"] for prompt in prepare.prompts()] == kept_by_brute_force(texts, 0.8)
    assert {"exact duplicate", "near duplicate"} == set(reasons(prepare))


MODES = [
    *(asked(system, LONG) for system in ("detailed thinking on", "detailed thinking off")),
    *(asked(f"You are person {number}.", LONG) for number in range(20)),
    *(asked(f"{' '.join(VOCABULARY)} {mode}", LONG) for mode in ("fast", "slow")),
    *(chat(f"{LONG}{end}") for end in ("", " /think", " /no_think", "\n/nothink", " /set verbose", " <|no_think|>")),
    *(chat(f"Thinking: {mode}\n{LONG}") for mode in ("on", "off")),
    *(chat(f"Reasoning effort: {mode}. {LONG}") for mode in ("low", "medium", "high")),
    *(chat(LONG, "x", f"Go on {mode}") for mode in ("/think", "/no_think")),
    *(chat(LONG, chat_template_kwargs={"enable_thinking": mode}) for mode in (True, False)),
    *(chat(LONG, tools=[{"name": name, "parameters": {"type": "object"}}]) for name in ("search", "order")),
]


def test_one_question_in_several_modes_is_several_prompts_each_of_them_once(prepare, caplog):
    rows = MODES
    caplog.set_level("INFO")

    def nearly(row: dict) -> dict:
        [*before, question] = row["messages"]
        return {**row, "messages": [*before, {**question, "content": f"so {question['content']}"}]}

    prepare([*rows, *rows, *map(nearly, rows)], tools="keep")
    assert [prompt["messages"] for prompt in prepare.prompts()] == [
        [turn for turn in row["messages"] if turn["role"] != "assistant"] for row in rows
    ]
    assert reasons(prepare) == ["exact duplicate"] * len(rows) + ["near duplicate"] * len(rows)
    same = sum(row["messages"][-1]["content"] == LONG for row in rows)  # the mode is not in the question
    assert f"kept: {same - 1} prompts with the question of another" in caplog.text


def test_the_first_in_the_order_of_the_sources_stays_and_reasons_tell_within_from_across(prepare, tmp_path):
    long = " ".join(VOCABULARY[:40])
    first = write(tmp_path / "first.jsonl", [chat("a", id=0), chat(long, id=1), chat("A!", id=2)])
    second = write(tmp_path / "second.jsonl", [chat("a", id=0), chat(f"{long} more", id=1), chat("b", id=2)])
    ledger = prepare(sources=[{"path": str(first)}, {"path": str(second)}])
    assert [prompt["id"] for prompt in prepare.prompts()] == ["first/0", "first/1", "second/2"]
    assert ledger["sources"]["first"]["rejected"] == {"exact duplicate": 1}
    assert ledger["sources"]["second"]["rejected"] == {
        "exact duplicate of another source": 1,
        "near duplicate of another source": 1,
    }


def test_prompts_past_a_sources_limit_do_not_make_later_ones_duplicates(prepare, tmp_path):
    first = write(tmp_path / "first.jsonl", [chat("a"), chat("b"), chat("c")])
    second = write(tmp_path / "second.jsonl", [chat("a"), chat("b"), chat("d")])
    limited = [{"path": str(path), "limit": 1} for path in (first, second)]
    prepare(sources=[*limited, {"path": str(first), "name": "again"}])
    kept = [(prompt["source"], prompt["messages"][0]["content"]) for prompt in prepare.prompts()]
    assert kept == [("first", "a"), ("second", "b"), ("again", "c")]


def test_either_kind_can_be_turned_off_but_ids_stay_unique(prepare):
    long = " ".join(VOCABULARY[:40])
    rows = [chat("a", id=1), chat("A", id=2), chat(long, id=3), chat(f"{long} more", id=4), chat("A", id=1)]
    rows += [chat("b", id=1), chat("c", id=1)]
    for settings, refused in {
        (False, True): ["exact duplicate"] * 2,
        (False, False): ["duplicate id"],
        (True, False): ["near duplicate"] * 3,
    }.items():
        prepare(rows, duplicates={"near": settings[0], "exact": settings[1]})
        assert reasons(prepare) == refused
        ids = [prompt["id"] for prompt in prepare.prompts()]
        assert len({*ids}) == len(ids) == len(rows) - len(refused)


def test_kept_answers_count_as_part_of_the_prompt(prepare):
    assert prepare([chat("a", "x"), chat("a", "y")], keep_answers=True)["prompts"] == 2
    assert prepare([chat("a", "x"), chat("a", "y")])["prompts"] == 1
    answer = " ".join(VOCABULARY[100:140])
    rows = [chat(LONG, answer), chat(f"so {LONG}", f"{answer} so"), chat(LONG, LONG), chat(answer, answer)]
    prepare(rows, keep_answers=True)
    assert reasons(prepare) == ["near duplicate"]


# Prompts that earlier runs have kept


FIRST = [chat("What is a monad?", "x"), chat("Sort a list, please", "x"), chat("First", "an answer", "Then this", "x")]
SECOND = [
    chat("what is a MONAD", "y"), chat("Sort a tuple, please", "y"), chat("First", "another answer", "then this"),
    chat("First"), chat("Something new"),
]  # fmt: skip


def test_what_earlier_runs_have_kept_is_left_out_and_counted_also_when_they_have_changed(tmp_path):
    first, second, third = (Prepare(tmp_path / name) for name in ("first", "second", "third"))
    first(FIRST[:1])
    known = {"known": [str(first.out_dir)]}
    assert second(SECOND, duplicates=known)["prompts"] == 4
    first(FIRST)
    second(SECOND, duplicates=known)
    assert kept_texts(second) == ["Sort a tuple, please", "First", "Something new"]
    assert reasons(second) == [f"known: {first.out_dir} has it"] * 2
    both = {"known": [str(first.out_dir), str(second.out_dir)]}
    third([*SECOND, chat("Newer still")], duplicates=both)
    assert kept_texts(third) == ["Newer still"]
    with pytest.raises(InputError, match=r"duplicates\.known=\['/nowhere'\]: /nowhere/prompts/prompts\.jsonl does not"):
        third(SECOND, duplicates={"known": ["/nowhere"]})


def test_what_earlier_runs_have_nearly_is_left_out_with_a_warning_if_it_is_most(tmp_path, caplog):
    first, second = (Prepare(tmp_path / name, near=True) for name in ("first", "second"))
    texts = texts_with_copies(100, seed=6)
    first([chat(text) for text in texts[:50]])
    settings = {"known": [str(first.out_dir)], "bands": 30, "band_rows": 1, "comparisons": 600}
    second([chat(text) for text in texts], duplicates=settings)
    kept = kept_by_brute_force([*kept_texts(first), *texts], 0.8)
    assert kept_texts(second) == kept[len(kept_texts(first)) :]
    assert {f"known: {first.out_dir} has it", f"known: {first.out_dir} has a near duplicate"} <= set(reasons(second))
    assert "prompts.duplicates.known" in caplog.text

    caplog.clear()
    modes = [asked("detailed thinking off", texts[0]), chat("Something new"), chat("Newer still")]
    assert second([*modes, chat(texts[0])], duplicates=settings)["prompts"] == 3
    assert "prompts.duplicates.known" not in caplog.text
    with pytest.raises(InputError, match=r"prompts\.duplicates\.known=.*every prompt"):
        second([chat(text) for text in kept_texts(first)], duplicates=settings)
    # Answers that only one of the two has do not count.
    second([chat(texts[0], "an answer"), chat("New", "x")], duplicates=settings, keep_answers=True)
    assert reasons(second) == [f"known: {first.out_dir} has a near duplicate"]
    (first.folder / "prompts.jsonl").write_text('{"messages": "x"}\n')
    with pytest.raises(InputError, match=r"prompts\.duplicates\.known: .*prompts\.jsonl"):
        second([chat("a")], duplicates=settings)
