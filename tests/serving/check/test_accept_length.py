"""Accept length as a check: against the least useful one and the export's own."""

from collections.abc import Callable

import pytest
from exported_head import measured, with_record

from eagle3.decoding.speculate import Decoded, Measurement
from eagle3.head_files.files import read_files
from eagle3.head_files.record import HeadRecord
from eagle3.serving.check import accept_length
from eagle3.serving.check.accept_length import Measurer
from eagle3.serving.head.export import TrainedHead


@pytest.fixture
def measurer(make_measurer: Callable[..., Measurer]) -> Measurer:
    return make_measurer()


@pytest.fixture
def at_export(trained_on_tiny: TrainedHead) -> Callable[..., HeadRecord]:
    """Make the record of a head with what its export measured."""
    return lambda **changes: with_record(trained_on_tiny, accept_length=measured(**changes)).record


@pytest.mark.parametrize(
    ("then", "now", "value", "fails"),
    [
        ("float32", "float32", 1.89, True),  # 5 percent are 0.1
        ("float32", "float32", 1.91, False),
        ("float32", "float32", 2.11, True),
        ("bfloat16", "bfloat16", 2.17, False),  # near-ties may have flipped: two standard errors more are 0.08
        ("bfloat16", "float32", 2.17, False),
        ("bfloat16", "float32", 2.19, True),
    ],
)
def test_more_than_5_percent_off_the_exports_own_measurement_is_an_error(then, now, value, fails, at_export, measurer):
    finding = measurer.finding(measured(dtype=now, accept_length=value), at_export(dtype=then))
    assert finding.level == ("error" if fails else "ok")
    assert "the export measured 2.000 on the same" in finding.message
    assert ("max_difference=0.05" in finding.message) is fails


@pytest.mark.parametrize("changes", [{"prompts_hash": "other"}, {"temperature": 0.5}, {"steps": 3}], ids=str)
def test_what_was_measured_otherwise_is_not_compared(changes, at_export, measurer):
    record = at_export(accept_length=3.0)
    assert "the export measured" in measurer.finding(measured(), record).message
    finding = measurer.finding(measured(**changes), record)
    assert (finding.level, "the export measured" in finding.message) == ("ok", False)


def test_a_head_without_a_record_is_measured_against_the_least_useful_accept_length(
    make_measurer,
):
    measurer = make_measurer(min_accept_length=2.0)
    assert measurer.finding(measured(accept_length=2.0), None).level == "ok"
    finding = measurer.finding(measured(accept_length=1.99), None)
    assert finding.level == "error" and "check.min_accept_length is 2.0; if the other checks" in finding.message


def test_one_answer_that_holds_all_verifications_has_an_accept_length_and_no_error(
    exported, make_measurer, monkeypatch
):
    measurer = make_measurer(questions=["What is a list?", "What is a tuple?", "What is a set?"])
    long, short = Decoded([5] * 40, 20, [12, 8], 0, "stop"), Decoded([2], 0, [0, 0], 0, "stop")
    decodings = Measurement([long, short, short], 1.0, 1.0)
    monkeypatch.setattr(accept_length, "measure", lambda *given, **settings: decodings)
    result = measurer.measured(read_files(exported), measurer.prompts(None))
    assert (result.accept_length, result.standard_error, result.dtype) == (2.0, None, "float32")
