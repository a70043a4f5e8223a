"""The target's answers to what it wrote as a user: made at once, kept by the answers stage."""

import logging
from array import array
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from eagle3.answers.build import answer_settings, build_chat
from eagle3.answers.chat import Chat
from eagle3.answers.dialogue import Dialogue
from eagle3.answers.store import MadeWith
from eagle3.engine.endpoint import Answer
from eagle3.settings.precomputing import PrecomputeRun
from eagle3.storage.files import read_jsonl, sha256_json
from eagle3.target.identity import COMPARED, TargetIdentity
from eagle3.target.stored import StoredTarget
from eagle3.target_prompts.store import FOLDER, finished_rounds, prompt_id

log = logging.getLogger(__name__)

Made = dict[str, Any]  # an answer: `asked`, and the fields of Answer


@dataclass(frozen=True)
class AnsweredPrompt:
    """A task for an answerer: a prompt whose first turns have answers. Only the others are asked for."""

    prompt: dict[str, Any]
    made: list[Made]

    def begin(self, chat: Chat, **settings: Any) -> Dialogue:
        dialogue = Dialogue(self.prompt, chat, **settings)
        for each in self.made:
            if not dialogue.waiting or each["asked"] != asked(dialogue.prompt_ids, dialogue.seed):
                break  # the prompts stage has changed the text
            dialogue.answer(Answer(list(each["token_ids"]), each["finish_reason"]))
        return dialogue


def asked(prompt_ids: list[int], seed: int) -> str:
    return sha256_json([prompt_ids, seed])[:32]


def answered_with(target: TargetIdentity, made: MadeWith) -> str:
    """Return a hash of what decides an answer, apart from its prompt."""
    model = {part: getattr(target, part) for part in (*COMPARED, "precision")}
    return sha256_json([model, made.answers, made.chat, made.sampling, made.seed])


def answers_made(run: PrecomputeRun, target: StoredTarget) -> "AnswersMade":
    """Return the answers of earlier stages that this run's answers stage would make in the same way."""
    chat = build_chat(run.chat, target)
    identity = target.identity.with_template(chat.settings["template_hash"])
    return AnswersMade(run.folder, answered_with(identity, answer_settings(run, chat)))


class AnswersMade:
    """The answers in DIR/target_prompts, by prompt. They are read when the first is asked for."""

    def __init__(self, out_dir: Path, expected: str) -> None:
        """`expected`: answered_with() of this run. Other answers are left out, and a line of the log counts them."""
        self.out_dir, self.expected = out_dir, expected

    def __call__(self, prompt: dict[str, Any]) -> dict[str, Any] | AnsweredPrompt:
        """Return the item for an answerer: with its answers, if the prompt has any."""
        made = self._by_prompt.pop(prompt["id"], None)
        return prompt if made is None else AnsweredPrompt(prompt, made)

    @cached_property
    def _by_prompt(self) -> dict[str, list[Made]]:
        by_prompt = dict[str, list[Made]]()
        others = 0
        for path in finished_rounds(self.out_dir):
            for row in read_jsonl(path):
                if not row.get("answers"):
                    continue
                if row["answered_with"] == self.expected:
                    compact = [each | {"token_ids": array("i", each["token_ids"])} for each in row["answers"]]
                    by_prompt[prompt_id(row["number"])] = compact
                else:
                    others += 1
        if others:
            log.info(
                "the answers to %d samples in %s were made with other settings, and are not used",
                others, self.out_dir / FOLDER,
            )  # fmt: skip
        return by_prompt
