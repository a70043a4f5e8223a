"""Loss masks: which tokens stay."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from feature_data import feature_data
from stores import MADE_FROM, in_float32, random_sample, random_samples, write_store

from eagle3.errors import InputError
from eagle3.features.index import SampleEntry
from eagle3.features.loss_mask import AllTurns, Everything, LastTurn, WithoutReasoning
from eagle3.features.sample import Sample
from eagle3.features.samples import SampleRef, Samples

TURNS = [0, 1, 1, 1, 0, 2, 2, 2, 2, 2]


@pytest.mark.parametrize(
    ("mask", "stored", "kept"),
    [
        (AllTurns(), "answers", TURNS),
        (LastTurn(), "answers", [0, 0, 0, 0, 0, 2, 2, 2, 2, 2]),
        (Everything(), "all", [1] * len(TURNS)),  # prompts too, where the store has their teacher
    ],
)
def test_a_mask_keeps_its_turns(mask, stored, kept):
    mask.check(replace(MADE_FROM, teachers=stored))
    assert mask(random_sample(TURNS, stored=stored)).tolist() == kept


def test_last_turn_trains_the_last_sample_of_each_conversation_of_each_store():
    ids = [("a", "p#0"), ("a", "p#2"), ("a", "q#0"), ("b", "p#0"), ("a", "p#10"), ("a", "p#1")]
    no_turns = [("c", name) for name in ("0", "1", "abc", "issue#fix", "p", "#2")]  # each is a conversation
    entries = [(store, SampleEntry(name, 0, 0, 9, 5, 4, 0.5, "")) for store, name in ids + no_turns]
    samples = Samples.of([SampleRef(store, "shard", entry) for store, entry in entries])
    last = [(str(ref.store), ref.entry.id) for ref in LastTurn().select(samples)]
    assert last == [("a", "p#10"), ("a", "q#0"), ("b", "p#0"), *no_turns]
    assert AllTurns().select(samples) == samples


ONE, TWO = [[7], [8]], [[7, 6], [8, 6]]  # markers of one token, and of two
SHORT = [0, 0, 0, 1, 1, 1, 0, 2, 2, 2]


@pytest.mark.parametrize(
    ("markers", "turns", "tokens", "kept"),
    [
        (ONE, TURNS, [9, 9, 9, 9, 9, 7, 9, 8, 9, 9], [0, 1, 1, 1, 0, 0, 0, 0, 2, 2]),
        (ONE, TURNS, [9, 9, 9, 9, 7, 9, 8, 9, 9, 9], [0, 1, 1, 1, 0, 0, 0, 2, 2, 2]),  # opened by the prompt
        (ONE, TURNS, [9, 9, 9, 9, 9, 7, 9, 9, 9, 9], [0, 1, 1, 1, 0, 0, 0, 0, 0, 0]),  # never closed
        (ONE, TURNS, [9, 9, 7, 9, 9, 9, 9, 8, 9, 9], [0, 1, 0, 0, 0, 2, 2, 2, 2, 2]),  # never closed in its own turn
        (ONE, TURNS, [9, 7, 8, 9, 9, 9, 7, 9, 8, 9], [0, 0, 0, 1, 0, 2, 0, 0, 0, 2]),
        (ONE, TURNS, [9, 9, 9, 9, 9, 7, 8, 7, 9, 8], [0, 1, 1, 1, 0, 0, 0, 0, 0, 0]),  # one right after the other
        (TWO, TURNS, [9, 7, 9, 6, 9, 7, 6, 8, 6, 9], [0, 1, 1, 1, 0, 0, 0, 0, 0, 2]),
        (ONE, SHORT, [7, *[9] * 9], SHORT),  # typed by the user: the end of the turn and a header follow
        (ONE, SHORT, [7, 9, 8, *[9] * 7], SHORT),  # a prompt that closes what it opens: no reasoning is wanted
    ],
)
def test_without_reasoning_leaves_out_the_spans_between_the_markers(markers, turns, tokens, kept):
    mask = WithoutReasoning()
    mask.check(replace(MADE_FROM, reasoning_ids=markers))
    assert mask(replace(random_sample(turns), input_ids=torch.tensor(tokens))).tolist() == kept


def samples_under(mask: AllTurns, store: Path) -> list[str]:
    data = feature_data(str(store), pack_tokens=99, val_fraction=0.5, loss_mask=mask)
    return [ref.entry.id for side in (data.train_samples, data.val_samples) for ref in side]


def test_training_reads_what_the_mask_selects_and_counts_the_rest(tmp_path, caplog):
    caplog.set_level("INFO")
    ids = ["p0#0", "p0#1", "p1#0", "p2#0", "p3#0", "p3#2"]
    one_anchor = in_float32(random_sample([0, 1, 1]))
    samples = [replace(sample, id=name) for sample, name in zip([*random_samples(5), one_anchor], ids, strict=True)]
    store = write_store(tmp_path / "features", samples)
    assert sorted(samples_under(LastTurn(), store)) == ["p0#1", "p1#0", "p2#0", "p3#2"]
    assert "loss_mask=LastTurn leaves nothing to train in 2 of 6 samples" in caplog.text
    caplog.clear()
    assert sorted(samples_under(AllTurns(), store)) == ids and "left out" not in caplog.text


@pytest.mark.parametrize("marker", [7, 5])
def test_a_mask_that_changes_nothing_says_so(tmp_path, caplog, marker):
    first, *others = [replace(sample, input_ids=torch.full_like(sample.input_ids, 9)) for sample in random_samples(6)]
    reasons = replace(first, input_ids=torch.full_like(first.input_ids, 7))
    store = write_store(tmp_path / "features", [reasons, *others], reasoning_ids=[[marker], [8]])
    samples_under(WithoutReasoning(), store)
    said = f"loss_mask=WithoutReasoning changes nothing: no answer of {store}"
    assert (said in caplog.text) == (marker == 5)


@pytest.mark.parametrize(
    ("mask", "made_from", "message"),
    [
        *(
            (WithoutReasoning(), {"reasoning_ids": ids}, r"loss_mask=without_reasoning .*features\.reasoning")
            for ids in (None, [[7], []], [[], [8]])
        ),
        (Everything(), {"teachers": "answers"}, r"loss_mask=everything .*features\.teachers=all"),
    ],
)
def test_a_store_that_cannot_serve_a_mask_is_refused_with_a_fix(mask, made_from, message):
    with pytest.raises(InputError, match=message):
        mask.check(replace(MADE_FROM, **made_from))


class NotSeven(AllTurns):
    """Marks prompt tokens as well."""

    def __call__(self, sample: Sample) -> torch.Tensor:
        return (sample.input_ids != 7).int()


def test_a_mask_may_only_mark_tokens_with_a_teacher(tmp_path):
    with pytest.raises(InputError, match=r"loss_mask=NotSeven marks tokens of sample p.*features\.teachers=all"):
        samples_under(NotSeven(), write_store(tmp_path / "answers", random_samples(3)))
    samples = random_samples(3, stored="all")
    assert len(samples_under(NotSeven(), write_store(tmp_path / "all", samples, teachers="all"))) == 3


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (lambda turns: turns[1:], r"returns torch\.int64 \[\d+\]"),
        (lambda turns: turns > 0, r"returns torch\.bool \[\d+\]"),
        (lambda turns: None, "returns NoneType"),
    ],
)
def test_a_mask_that_returns_no_turns_of_the_sample_is_one_line(returned, said, tmp_path):
    class Wrong(AllTurns):
        def __call__(self, sample: Sample) -> Any:
            return returned(sample.turns)

    class WrongSelect(AllTurns):
        def select(self, samples: Any) -> Any:
            return []

    with pytest.raises(InputError, match=r"loss_mask=WrongSelect: its select returns list; return Samples"):
        samples_under(WrongSelect(), write_store(tmp_path / "selected", random_samples(3)))
    with pytest.raises(InputError, match=rf"loss_mask=Wrong {said} for sample p.*; return a tensor like sample\.turns"):
        samples_under(Wrong(), write_store(tmp_path / "features", random_samples(3)))
