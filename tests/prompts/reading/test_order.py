"""Rows whose turns are no conversation from its first turn to its last are refused."""

from datetime import datetime

import pytest
from prompt_stage import read_messages, users

from eagle3.prompts import Refused

ORDER = "turns in another order than a key of theirs says"
CONVERSATIONS = "turns of several conversations"
BRANCHES = "turns of several branches of a conversation"


def talk(key: str, *values: object) -> list[dict]:
    """Turns of the user, the assistant, the user, … with values of a key."""
    roles = ("user", "assistant")
    turns = [{"role": roles[index % 2], "content": str(index), key: value} for index, value in enumerate(values)]
    return [{"id": str(index), **turn} for index, turn in enumerate(turns)]


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        (talk("timestamp", 2, 3, 1), ORDER),
        (talk("ts", "1700000002.5", None, "1700000001"), ORDER),
        (talk("created_at", "2024-01-02T00:00:00Z", None, "2024-01-01"), ORDER),
        (talk("createdAt", datetime(2024, 1, 2), None, datetime(2024, 1, 1)), ORDER),  # Parquet's
        (talk("index", 0, 1, 2), None),
        (talk("timestamp", 1, 9, 1), None),  # an answer's clock may be another one
        (talk("created_at", "2024-01-01T10:00:00.5Z", None, "2024-01-01T10:00:01+00:00"), None),
        (talk("created_at", "noon", True, "morning"), None),
        (talk("parentId", None, "0", "1"), None),
        (talk("sent_at", 2, None, 1), ORDER),
        (talk("messageIndex", 2, None, 1), ORDER),
        (talk("createdAt", {"$date": "2024-01-02T00:00:00Z"}, None, {"$date": {"$numberLong": "1700000000000"}}), None),
        (talk("createdAt", {"$date": "2024-01-02T00:00:00Z"}, None, {"$date": "2024-01-01T00:00:00Z"}), ORDER),
        (talk("parent", None, "0", "0"), BRANCHES),
        (talk("ancestors", [], ["0"], []), BRANCHES),
        (talk("ancestors", [], ["0"], ["0", "1"]), None),
        (talk("children", ["1", "2"], [], []), BRANCHES),
        (talk("children", ["1"], ["2"], []), None),
        (talk("parent_id", "root", "0", "0"), BRANCHES),
        (talk("parentMessageId", None, "0", None), BRANCHES),
        ([*talk("parentId", None, "0"), *users("a")], None),
        (talk("parent_id", None, None, None), None),  # a table fills in null
        (talk("session_id", "1", "1", "2"), CONVERSATIONS),
        (talk("threadId", 1, None, 1), None),
        ([{**users("a")[0], "children": users("b")}], "turns inside a turn"),
        ([{**users("a")[0], "children": ["1"], "replies": 3}], None),
    ],
)
def test_turns_out_of_order_and_trees_are_refused(turns, reason):
    if reason is None:
        assert read_messages({"messages": turns}, keep_answers=False)
        return
    with pytest.raises(Refused, match=reason) as refused:
        read_messages({"messages": turns}, keep_answers=False)
    assert refused.value.name in turns[0]
