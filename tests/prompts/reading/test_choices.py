"""Multiple-choice questions are asked with their options, wherever a data set keeps these."""

import json

import pytest
from prompt_stage import read_messages, users

from eagle3.prompts import Refused

WEATHER = ["rain", "snow", "hail"]
LISTED = "Which?\n\nA. rain\nB. snow\nC. hail"


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"choices": WEATHER, "answer": 1}, LISTED),
        ({"options": json.dumps(WEATHER)}, LISTED),
        ({"choices": {"text": WEATHER, "label": ["A", "B", "C"]}}, LISTED),
        ({"choices": [{"label": label, "text": text} for label, text in zip("ABC", WEATHER, strict=True)]}, LISTED),
        ({"options": {"A": "rain", "B": "snow", "C": "hail", "D": None, "E": float("nan")}}, LISTED),
        ({"A": "rain", "B": "snow", "C": "hail", "answer": "B"}, LISTED),
        ({"option1": "rain", "option2": "snow", "option3": "hail", "option4": ""}, LISTED),
        ({"Option_A": "rain", "Option_B": "snow", "Option_C": "hail"}, LISTED),
        ({"optionA": "rain", "optionB": "snow", "optionC": "hail", "optionD": float("nan")}, LISTED),
        ({"Choice-1": "rain", "Choice-2": "snow", "Choice-3": "hail"}, LISTED),
        ({"option_0": "rain", "option_1": "snow", "option_2": "hail"}, LISTED),
        ({"opa": "rain", "opb": "snow", "opc": "hail"}, LISTED),
        ({"distractor2": "snow", "distractor1": "hail", "correct_answer": "arid"},
         "Which?\n\nA. arid\nB. hail\nC. snow"),
        ({"Incorrect Answer 1": "snow", "Incorrect Answer 2": "hail", "Correct Answer": "arid"},
         "Which?\n\nA. arid\nB. hail\nC. snow"),
        ({"options": ["A) rain", "B) snow"]}, "Which?\n\nA) rain\nB) snow"),
        ({"options": "a ) 1 , b ) 2"}, "Which?\n\na ) 1 , b ) 2"),
        ({"options": "[A] rain [B] snow"}, "Which?\n\n[A] rain [B] snow"),
        ({"options": {"A": 1, "B": 2}}, "Which?\n\nA. 1\nB. 2"),
        ({"options": [1, 2]}, "Which?\n\nA. 1\nB. 2"),
        ({"question": "1 or 2?", "options": [1, 2]}, "1 or 2?\n\nA. 1\nB. 2"),
        ({"context": "Look up.", "choices": ["rain", "snow"]}, "Which?\n\nLook up.\n\nA. rain\nB. snow"),
    ],
)  # fmt: skip
def test_options_follow_their_question(row, text):
    assert read_messages({"question": "Which?", **row}, keep_answers=False) == users(text)
    [turn] = read_messages({"messages": users("What?"), **row}, keep_answers=False)
    assert turn["content"] == "What?\n\n" + text.rpartition("\n\n")[2]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": users("Which?\n(A) rain\n(B) snow"), "choices": ["rain", "snow"]},
        {"messages": users("a"), "choices": [{"index": 0, "message": {"role": "assistant", "content": "b"}}]},
        {"prompt": "a", "option_a": float("nan"), "option_b": float("nan"), "choices": float("nan")},
        {"prompt": "a", "A": "one letter is no list"},
        {"prompt": "a", "options": {"temperature": 0.1, "stop": ["\n"]}},
        {"turns": ["- rain\n- snow", "b"], "choices": ["rain", "snow"]},
    ],
)
def test_options_that_the_question_holds_and_choices_of_a_completion_are_not_added(row):
    asked = row.get("messages") or users(*(row.get("turns") or [row.get("prompt")]))
    assert read_messages(row, keep_answers=False) == asked


def test_options_without_a_place_are_refused():
    for row, reason in (
        ({"turns": ["a", "b"], "choices": ["rain", "snow"]}, "conversation with choices"),
        ({"question": "a", "distractor1": "rain"}, "row with distractor1 and no correct answer"),
        ({"question": "a", "choices": [["rain"], ["snow"]]}, "row with choices that are no texts"),
        ({"question": "a", "choices": ["rain", float("nan")]}, "row with choices that are no texts"),
        ({"question": "a", "options": "['rain' 'snow']"}, "row with options as Python writes them, not JSON"),
    ):
        with pytest.raises(Refused, match=reason):
            read_messages(row, keep_answers=False)


def test_added_options_are_counted(prepare):
    ledger = prepare(
        [{"question": "Which?", "choices": ["rain", "snow"], "license": "MIT"}, {"prompt": "b", "license": "MIT"}]
    )
    assert ledger["sources"]["chats"]["found"]["reading"] == {"options added to the question": 1}
