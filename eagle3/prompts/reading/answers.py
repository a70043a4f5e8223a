"""How the answers of a row were made and ended, and whether they are answers to its questions."""

from typing import Any

from eagle3.prompts.reading.prompt import Refused
from eagle3.prompts.reading.shapes import Columns, Layout, is_empty, plain_name
from eagle3.prompts.reading.tools import Turn

# Keys of a kept answer that say how it was made: docs/how-to/imported-answers.md.
MADE = ("prompt_ids", "output_ids")
# How servers say that an answer ended, or was cut.
ENDS = {
    **dict.fromkeys(("stop", "end_turn", "eos", "eos_token"), "stop"),
    **dict.fromkeys(("length", "limit", "max_tokens", "max_output_tokens", "model_length"), "length"),
}
# What SpecForge, LiteLLM, LangSmith and others write as the `status` of a request without an answer: the answers in
# such a row, if it has any, are those of the data set.
FAILED = frozenset(("error", "failed", "failure", "skipped", "cancelled", "canceled", "aborted", "timeout"))
# Where logs of requests and of generations have the answer, in addition to the columns that are read; as `plain_name`
# returns them.
ANSWERS_ELSEWHERE = frozenset(("choices", "completions", "content", "generations", "message", "outputs", "responses"))
# Keys of a turn that keep it from training, each with the values that do: of OpenAI and Mistral (weight), axolotl
# (train, training), ms-swift (loss), LLaMA-Factory (loss_weight), torchtune (masked).
NOT_TRAINED = {
    **dict.fromkeys(("weight", "train", "training", "train_on_turn", "trainable", "trained", "loss", "loss_mask",
                   "loss_weight"), (0, "0", "false", "False")),
    **dict.fromkeys(("masked", "mask"), (1, "1", "true", "True")),
}  # fmt: skip


def require_answered(turns: list[Turn], columns: Columns) -> None:
    """Refuse a row whose request failed, and one that has the answer to its last question elsewhere: the answers among
    its turns are then another model's, or those of earlier requests."""
    status, error = columns.row.get("status"), columns.row.get("error")
    if isinstance(status, str) and status.lower() in FAILED:
        raise Refused("row of a request that failed", name="status")
    if error and not is_empty(error):
        raise Refused("row of a request that failed", name="error")
    if not turns or turns[-1][0] not in ("user", "tool"):
        return
    names = ANSWERS_ELSEWHERE.union(map(plain_name, columns.shape.fields["answer"]))
    elsewhere = [column for column in columns.row if plain_name(column).partition(".")[0] in names]
    if name := next(iter(elsewhere), columns.name("finish_reason")):
        raise Refused("the answer to the last question is not among the turns: make it the last of them", name=name)


def read_answer_facts(turn: dict, shape: Layout) -> dict[str, Any]:
    """Return how an answer was made, if it says so. Text in it is not kept: no check of a prompt would read it."""
    made = {key: turn[key] for key in MADE if turn.get(key) is not None}
    if any(turn.get(key) in values for key, values in NOT_TRAINED.items()):
        made["trained"] = False
    if ("prompt_ids" in made) != ("output_ids" in made):
        raise Refused("only one of prompt_ids and output_ids")
    if not all(_are_ids(made[key]) for key in ("prompt_ids", "output_ids") if key in made):
        raise Refused("prompt_ids or output_ids are no list of whole numbers")
    ends = ends_stated(turn, shape)
    if not ends and turn.get("status") == "incomplete":  # of the Responses API, which says why next to its items
        ends = {"other"}
    if ends:
        made["finish_reason"] = next((end for end in ("other", "length") if end in ends), "stop")
    return made


def ends_stated(turn: dict, shape: Layout) -> set[str]:
    """Return what a turn says of its end: stop, length, other. A word next to `stop` is that of a stop string, after
    which the target wrote no end of turn; the id of a token next to it is that of the end."""
    stated: list[Any] = []
    for name in shape.fields["finish_reason"]:
        stated += value if isinstance(value := turn.get(name), list) else [value]
    # SGLang: {"type": "stop", "matched": 2}
    parts = [[each.get("type"), each.get("matched")] if isinstance(each, dict) else [each] for each in stated]
    said = [each for part in parts for each in part if each is not False and not is_empty(each)]
    ends = {ENDS.get(each.lower(), "other") for each in said if isinstance(each, str)}
    if any(each is True for each in said):  # Model-Optimizer: "truncated": true
        ends.add("length")
    return ends or ({"other"} if said else set())


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int and each >= 0 for each in value)
