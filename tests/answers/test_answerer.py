"""Any answerer fits the interface: one that looks up the target's answers gives the same rows."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from eagle3.answers.answerer import Answerer, Sampling
from eagle3.answers.chat import Chat
from eagle3.answers.dialogue import Dialogue
from eagle3.answers.huggingface import HuggingFaceAnswerer
from eagle3.answers.store import read_answers
from eagle3.engine.endpoint import Answer
from eagle3.storage.files import read_jsonl, write_jsonl
from eagle3.target.model import Target
from eagle3.workers.meter import Progress
from eagle3.workers.task import Take
from tests.answers.test_stage import answer_by

GREEDY = Sampling(temperature=0, top_p=1.0, top_k=0, max_new_tokens=8)
Row = dict[str, Any]


class LookUp(Answerer):
    """Answers the whole of one conversation, then the next, the last one first."""

    name = "looked up"

    def __init__(self, rows: Iterable[Row]) -> None:
        self.answers = {
            tuple(row["input_ids"][:start]): Answer(row["input_ids"][start:end], reason)
            for row in rows
            for (start, end), reason in zip(row["turns"], row["finish_reasons"], strict=True)
        }

    def __call__(self, take: Take[Dialogue], progress: Progress) -> Iterator[list[Dialogue]]:
        for conversation in take(100)[::-1]:
            while conversation.waiting:
                found = self.answers.get(tuple(conversation.prompt_ids))
                conversation.answer(found) if found else conversation.fail("not to be found")
            progress.add(ended=1)
            yield [conversation]


def test_answers_looked_up_make_the_rows_of_those_that_the_target_gave(
    target: Target, chat: Chat, tmp_path: Path
) -> None:
    questions = [["How is `vfield` used?", "And `sfield`?"], ["What is `to_dict`?"], ["Why?", "Why not?", "When?"]]
    turns = [[{"role": "user", "content": text} for text in each] for each in questions]
    prompts = [{"id": f"p{n}", "source": "s", "license": "MIT", "messages": each} for n, each in enumerate(turns)]
    for name in ("given", "looked_up", "partly"):
        write_jsonl(tmp_path / name / "prompts/prompts.jsonl", prompts)

    def rows(name: str, answerer: Any) -> dict[str, Row]:
        answer_by(answerer, target, chat, GREEDY, tmp_path / name)
        return {row["id"]: row for row in read_jsonl(tmp_path / name / "answers/answers.jsonl")}

    plain = HuggingFaceAnswerer(target=target, sampling=GREEDY, batch_size=4, batch_tokens=4096, window=4)
    given = rows("given", plain)
    assert len(given) == 3
    assert rows("looked_up", LookUp(given.values())) == given
    assert read_answers(tmp_path / "looked_up/answers").made_with.answers == "looked up"

    kept = [row for row in given.values() if row["prompt_id"] != "p1"]
    assert rows("partly", LookUp(kept)) == {row["id"]: row for row in kept}
    [error] = read_jsonl(tmp_path / "partly/answers/errors.jsonl")
    assert error["prompt_id"] == "p1" and "not to be found" in error["reason"]
