"""Answers made elsewhere → training rows: by token ids as they are, by text where its tokens can be located exactly.

docs/how-to/imported-answers.md describes the format and every reason for a refusal.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Unpack

from eagle3.answers.calls import require_calls_rendered
from eagle3.answers.chat import (
    NOT_WHOLE,
    QUESTION,
    SENTINEL,
    Chat,
    Messages,
    RefusedConversation,
    common_start,
    ids_in_text,
)
from eagle3.answers.reasoning import Reasoning
from eagle3.answers.rows import AnsweredRow, AnswerError, error_row, new_row, too_long
from eagle3.prompts.reading.conversation import REASONING
from eagle3.prompts.reading.prompt import CALLS
from eagle3.settings.precomputing import ImportedSettings

CALL_IN_PARTS = "the answer is a call of a tool in parts, not the text that the target wrote"
CONTROL_TOKEN_BEFORE = "the text of a turn before the answer holds that of a control token"
CONTROL_TOKEN_INSIDE = "the answer's text holds that of a control token"
EMPTY = "the answer has no text: a server took its reasoning or calls out, or the request failed"
END_OF_TURN_INSIDE = "the answer contains an end-of-turn token"
FOREIGN_IDS = "token ids are outside the target's vocabulary"
INEXACT = "the answer's tokens do not decode to its text after the prompt"
HAS_THE_ANSWER = "prompt_ids end with the answer's ids"
NO_END_OF_TURN = "no end-of-turn token follows the answer"
NOT_CONTINUED = "the template does not render the answer as a continuation of its generation prompt"
NOT_THE_PROMPT = "prompt_ids do not decode to the text of the turns before"
NOT_THE_TEXT = "output_ids do not decode to the answer's text"
NOT_TRAINED = "the turn is marked as not to be trained"
PADDED = "prompt_ids begin with padding"
REASONING_OPEN = "reasoning begins before or in the answer and does not end once"
TWO_ANSWERS = "two assistant turns follow each other"
UNKNOWN_END = "finish_reason is neither stop nor length"

# Not compared: a cut may fall inside a character, and SentencePiece drops the first space of what stands alone.
CUT = "\ufffd \n\t\r"
THOUGHT = "Thought0453"  # like SENTINEL
MADE_OF = frozenset(("role", "content", CALLS, "tool_call_id", "name"))  # what a template sees of a message
UNSTATED = "unstated"


class ImportedAnswers:
    """Takes the place of an answerer: the conversations keep the answers that they came with."""

    def __init__(self, **settings: Unpack[ImportedSettings]) -> None:
        self.unstated = settings["finish_reason"]
        self.name = "imported" if self.unstated == "stop" else "imported, unstated ends are cuts"


@dataclass(frozen=True)
class AnswerRow:
    """One assistant turn. `refused` says why its tokens are not known exactly; otherwise `answer_ids` are the target's
    own, with the end-of-turn token where the target made one."""

    turn: int
    messages: Messages  # up to and including the answer
    prompt_ids: list[int]
    answer_ids: list[int]
    finish_reason: str
    refused: str | None


def imported_rows(
    prompt: dict[str, Any], chat: Chat, answers: ImportedAnswers, *, max_prompt_tokens: int | None, context: int | None
) -> tuple[list[AnsweredRow], list[AnswerError]]:
    """Rows (one per assistant turn whose tokens are known) and errors of a conversation that keeps its answers."""
    rows, refusals = [], []
    chat = chat.for_prompt(prompt)
    for answer in answer_rows(chat, prompt["messages"], unstated=answers.unstated):
        reason = answer.refused or too_long(answer.prompt_ids, max_prompt_tokens)
        length = len(answer.prompt_ids) + len(answer.answer_ids)
        if not reason and context is not None and length > context:
            reason = f"prompt and answer are longer than the target's context ({length} tokens, at most {context})"
        if reason:
            refusals.append((answer.turn, reason))
            continue
        row = new_row(prompt, answer.turn)
        rows.append(row.with_turn(answer.prompt_ids, answer.answer_ids, answer.finish_reason, None, answer.messages))
    if not rows and not refusals:
        refusals.append((0, "the conversation has no assistant turn to import"))
    return rows, [error_row(prompt, turn, reason, retry=True) for turn, reason in refusals]


def answer_rows(chat: Chat, messages: Messages, *, unstated: str = "stop") -> list[AnswerRow]:
    """One row per assistant turn. `unstated`: the finish reason of answers by text that state none."""
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    lost = _first_lost_call(chat, messages)
    return [_answer_row(chat, turn, messages, index, unstated, lost) for turn, index in enumerate(answers)]


def _first_lost_call(chat: Chat, messages: Messages) -> tuple[int, str]:
    """Return the place of the first call that the template does not render, and why; that of the end without one."""
    plain = [_plain(message) for message in messages]
    for index, message in enumerate(plain):
        try:
            if CALLS in message:
                require_calls_rendered(chat, plain[:index], message[CALLS])
        except RefusedConversation as refusal:
            return index, str(refusal)
    return len(messages), ""


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key in MADE_OF}


def _answer_row(
    chat: Chat, turn: int, messages: Messages, index: int, unstated: str, lost: tuple[int, str]
) -> AnswerRow:
    answer = messages[index]
    before = [_plain(message) for message in messages[:index]]
    before = [
        each | {"content": chat.returned(each["content"])} if each["role"] == "assistant" else each for each in before
    ]
    plain = [*before, _plain(answer)]
    made = {"finish_reason": answer["finish_reason"]} if "finish_reason" in answer else {}
    shown = [*plain[:-1], plain[-1] | made]
    finish_reason = answer.get("finish_reason", UNSTATED)
    if answer.get("trained") is False:  # part of later prompts all the same
        return AnswerRow(turn, shown, [], [], finish_reason, NOT_TRAINED)
    try:
        if CALLS in answer:
            raise RefusedConversation(CALL_IN_PARTS)
        if "output_ids" in answer:
            prompt_ids, answer_ids = _by_ids(chat, plain, answer, finish_reason)
        else:
            if index > lost[0]:
                raise RefusedConversation(lost[1])
            neighbours = messages[max(index - 1, 0) : index] + messages[index + 1 : index + 2]
            if any(message["role"] == "assistant" for message in neighbours):
                raise RefusedConversation(TWO_ANSWERS)
            if not answer["content"].strip():  # one that really is empty can be given by its ids
                raise RefusedConversation(EMPTY)
            ended = _has_ended(unstated if finish_reason == UNSTATED else finish_reason)
            prompt_ids, answer_ids = _by_text(chat, plain, ended=ended)
            finish_reason = finish_reason if ended else "length"  # data.finished_only depends on it
    except RefusedConversation as refusal:
        return AnswerRow(turn, shown, [], [], finish_reason, str(refusal))
    return AnswerRow(turn, shown, prompt_ids, answer_ids, finish_reason, None)


def _has_ended(finish_reason: str) -> bool:
    if finish_reason not in ("stop", "length"):
        raise RefusedConversation(UNKNOWN_END)
    return finish_reason == "stop"


# --- by token ids ----------------------------------------------------------------------------------------------------


def _by_ids(chat: Chat, messages: Messages, answer: dict[str, Any], finish_reason: str) -> tuple[list[int], list[int]]:
    """Take the ids as they are. Texts are compared, because the stage before has looked for personal data in these."""
    prompt_ids, output_ids = answer["prompt_ids"], answer["output_ids"]
    if max(prompt_ids + output_ids) >= len(chat.tokenizer):
        raise RefusedConversation(FOREIGN_IDS)
    chat.embedded(prompt_ids + output_ids)
    ended = _has_ended(finish_reason)
    if ended and output_ids[-1] not in chat.stop_ids:
        raise RefusedConversation(NO_END_OF_TURN)
    text_ids = output_ids[:-1] if ended else output_ids
    if not chat.stop_ids.isdisjoint(text_ids):
        raise RefusedConversation(END_OF_TURN_INSIDE)
    texts = (chat.decode(text_ids, skip_special_tokens=True), chat.decode(text_ids), chat.decode(output_ids))
    if answer["content"].strip(CUT) not in (text.strip(CUT) for text in texts):
        raise RefusedConversation(NOT_THE_TEXT)
    prompt = chat.decode(prompt_ids)
    if not all(each["content"].strip() in prompt for each in messages[:-1] if each["role"] != "assistant"):
        raise RefusedConversation(NOT_THE_PROMPT)
    if prompt_ids[-len(output_ids) :] == output_ids:
        raise RefusedConversation(HAS_THE_ANSWER)
    begins_with_bos = prompt_ids[0] == chat.tokenizer.bos_token_id  # which may be the pad token, too
    if chat.tokenizer.pad_token_id in prompt_ids[begins_with_bos:][:1]:
        raise RefusedConversation(PADDED)
    return prompt_ids, output_ids


# --- by text ---------------------------------------------------------------------------------------------------------


def _by_text(chat: Chat, messages: Messages, *, ended: bool) -> tuple[list[int], list[int]]:
    """Tokens up to the answer's first one, and those of the answer."""
    before = messages[:-1]
    prompt = chat.prompt(before)
    if any(chat.holds_control_token(message["content"]) for message in before if message["role"] != "assistant"):
        raise RefusedConversation(CONTROL_TOKEN_BEFORE)
    head, tail = chat.around_answer(before)
    inserted, answer = _located(chat, messages, prompt, head, tail, ended=ended)
    prompt_ids = chat.encode(prompt)
    ids = _continuation(chat, prompt, prompt_ids, inserted + answer)
    first = _first_token(chat, prompt_ids, ids, inserted)
    end = _end_of_turn(chat, before, tail) if ended else []
    return prompt_ids + ids[:first], ids[first:] + end


def _located(chat: Chat, messages: Messages, prompt: str, head: str, tail: str, *, ended: bool) -> tuple[str, str]:
    """Return the text between prompt and answer that the target did not write, and the answer as it did.

    An answer with its reasoning is all that the target wrote, whatever the template makes of it: it follows the prompt.
    One without stands where the template puts it, and has to stand there whole."""
    content, reasoning = messages[-1]["content"], chat.reasoning
    try:
        whole = chat.render(messages, add_generation_prompt=False)
    except RefusedConversation:
        if reasoning is None or not reasoning.begins(content):
            raise
        _require_rendered_in_fields(chat, messages, prompt, tail, ended=ended)
        return "", content
    closed = False
    if reasoning is not None:
        begun = prompt[len(common_start(prompt, chat.render(messages[:-1], add_generation_prompt=False))) :]
        closed = reasoning.end in begun
        opened = reasoning.opened_by(begun)
        if opened or (reasoning.begins(content) and not closed):
            return _with_reasoning(chat, reasoning, content, whole, prompt, tail, opened=opened, ended=ended)
    _refuse_control_tokens(chat, content)
    if whole != head + content + tail:
        raise RefusedConversation(NOT_WHOLE)
    if head.startswith(prompt):
        return head[len(prompt) :], content
    # The prompt may close an empty span of reasoning that the template leaves out of a written answer.
    same = len(common_start(prompt, head))
    if not (closed and reasoning and reasoning.is_empty(prompt[same:]) and reasoning.is_empty(head[same:])):
        raise RefusedConversation(NOT_CONTINUED)
    return "", content


def _with_reasoning(
    chat: Chat, reasoning: Reasoning, content: str, whole: str, prompt: str, tail: str, *, opened: bool, ended: bool
) -> tuple[str, str]:
    answer = reasoning.behind_start(content, prompt) if opened else content
    cut_while_reasoning = not ended and not opened and reasoning.end not in content
    if not (reasoning.is_one_span(answer) or cut_while_reasoning):
        raise RefusedConversation(REASONING_OPEN)
    if reasoning.content(answer) not in whole:
        raise RefusedConversation(NOT_WHOLE)
    _refuse_control_tokens(chat, reasoning.without_marks(answer))
    # White space that the template puts before the reasoning, as GLM's does, is the target's own first token.
    space = whole.removeprefix(prompt).removesuffix(tail).removesuffix(content)
    is_kept = space.isspace() and whole == prompt + space + content + tail
    return space if is_kept else "", answer


def _require_rendered_in_fields(chat: Chat, messages: Messages, prompt: str, tail: str, *, ended: bool) -> None:
    """Raise RefusedConversation unless the template writes this answer after the prompt when its reasoning is in a
    field next to the content, as gpt-oss' does: it refuses reasoning inside the content."""
    *before, answer = messages

    def rendered(thought: str, said: str) -> str:
        fields = {"content": said, **dict.fromkeys(REASONING, thought)}
        return chat.render([*before, {**answer, **fields}], add_generation_prompt=False)

    written = rendered(THOUGHT, SENTINEL)
    if not written.startswith(prompt) or written.count(THOUGHT) != 1 or written.count(SENTINEL) != 1:
        raise RefusedConversation(NOT_WHOLE)
    start, _, rest = written[len(prompt) :].partition(THOUGHT)
    between = rest.partition(SENTINEL)[0]
    thought, *said = answer["content"].removeprefix(start).split(between or THOUGHT)
    if not answer["content"].startswith(start) or len(said) > 1 or (ended and not said):
        raise RefusedConversation(REASONING_OPEN)
    _refuse_control_tokens(chat, "\n".join([thought, *said]))
    if said and rendered(thought, *said) != f"{prompt}{answer['content']}{tail}":
        raise RefusedConversation(NOT_WHOLE)


def _refuse_control_tokens(chat: Chat, answer: str) -> None:
    """Refuse text that would become tokens which the target writes to steer its server, not to be read."""
    ids = set(chat.encode(answer))
    if not chat.stop_ids.isdisjoint(ids):
        raise RefusedConversation(END_OF_TURN_INSIDE)
    if not chat.control_ids.isdisjoint(ids):
        raise RefusedConversation(CONTROL_TOKEN_INSIDE)


def _continuation(chat: Chat, prompt: str, prompt_ids: list[int], text: str) -> list[int]:
    """Return the tokens that continue the prompt with `text`: generation begins after prompt_ids, whatever the text
    would merge to."""
    before = chat.decode(prompt_ids)
    for ids in _tokenisations(chat, prompt, prompt_ids, text):
        if chat.decode(prompt_ids + ids) == before + text:
            return ids
    raise RefusedConversation(INEXACT)


def _tokenisations(chat: Chat, prompt: str, prompt_ids: list[int], text: str) -> Iterable[list[int]]:
    in_context = chat.encode(prompt + text)
    if in_context[: len(prompt_ids)] == prompt_ids:
        yield in_context[len(prompt_ids) :]
        # A tokenizer that puts a space of its own here leaves open whether the target wrote one that the text has lost.
        if not text[:1].isspace():
            return
    yield chat.encode(text)
    yield ids_in_text(chat.tokenizer, text)


def _first_token(chat: Chat, prompt_ids: list[int], ids: list[int], inserted: str) -> int:
    """Return how many of the tokens are the template's. One that joins white space of it to the answer is an answer's:
    after this prompt the target writes it."""
    if not inserted:
        return 0
    behind = chat.decode(prompt_ids) + inserted
    for count in range(len(ids) + 1):
        text = chat.decode(prompt_ids + ids[:count])
        if text == behind:
            return count
        if text.startswith(behind):
            break
    joined = len(chat.decode(prompt_ids + ids[: count - 1]))
    if not behind[joined:].isspace():
        raise RefusedConversation(NOT_WHOLE)
    return count - 1


def _end_of_turn(chat: Chat, before: Messages, tail: str) -> list[int]:
    """Return the token that ends the turn; none where the template writes more before it, so that the target's own
    next token is not known."""
    ids = chat.encode(tail)
    if chat.stop_ids.isdisjoint(ids):
        # Templates such as GLM's write no end of turn: the model ends with the token that opens the next turn.
        ids = chat.encode(chat.around_answer(before, QUESTION)[1].partition(QUESTION["content"])[0])
    if chat.stop_ids.isdisjoint(ids):
        raise RefusedConversation(NO_END_OF_TURN)
    return ids[:1] if ids[0] in chat.stop_ids else []
