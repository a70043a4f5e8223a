"""Why a text that the target wrote as a user is no prompt. Duplicates, languages, … are for the prompts stage."""

import re

from eagle3.answers.chat import Chat, Messages, RefusedConversation
from eagle3.engine.endpoint import Answer
from eagle3.target_prompts.user_turn import NO_BOUNDARY, REWRITTEN, UserTurn, own_tokens

CUT = "user turn cut at prompts.from_target.max_new_tokens"
TOKEN_INSIDE = "control token inside a user turn"
ROLE_INSIDE = "another role's marker inside a user turn"
NOT_TEXT = "user turn with broken characters"
TINY = "empty or tiny user turn"
LOOP = "user turn that repeats itself"

TINY_BYTES = 8  # three Chinese characters are more
RUN = 4  # tokens
LOOP_TOKENS = 32  # a shorter turn has too few tokens to look for repeats
# A line with nothing but a role, or one that begins a role's speech.
ROLE = re.compile(
    r"^[#*<\[|\s]*(?:(?:assistant|user|human|system)[>\]|*:\s]*$|(?:assistant|user|human)\s*:)", re.I | re.M
)


def checked(chat: Chat, turn: UserTurn, before: Messages, answer: Answer) -> tuple[str, str | None]:
    """Return the text of a user turn after the messages `before`, and the reason why it is none."""
    ended = answer.finish_reason == "stop"
    ids = answer.token_ids[:-1] if ended else answer.token_ids
    text = chat.decode(ids).strip()
    if not ended:
        return text, CUT
    if answer.token_ids[-1] not in {turn.end, *chat.stop_ids} or not own_tokens(chat).isdisjoint(ids):
        return text, TOKEN_INSIDE
    if "\ufffd" in text:
        return text, NOT_TEXT
    if len(text.encode()) < TINY_BYTES or not any(map(str.isalnum, text)):
        return text, TINY
    if not own_tokens(chat).isdisjoint(chat.encode(text)):  # written with other tokens
        return text, TOKEN_INSIDE
    if ROLE.search(text):
        return text, ROLE_INSIDE
    if is_loop(ids):
        return text, LOOP
    return text, _not_rendered(chat, turn, before, text)


def is_loop(ids: list[int]) -> bool:
    """Say whether more than half of the runs of RUN tokens have been there before."""
    runs = [tuple(ids[start : start + RUN]) for start in range(len(ids) - RUN + 1)]
    return len(ids) >= LOOP_TOKENS and len(set(runs)) < len(runs) / 2


def _not_rendered(chat: Chat, turn: UserTurn, before: Messages, text: str) -> str | None:
    """Return why the template does not put this text, unchanged, where the target has written it."""
    try:
        whole = chat.prompt([*before, {"role": "user", "content": text}])
    except RefusedConversation as refusal:
        return str(refusal)
    if whole != turn.before + text + turn.after:
        return REWRITTEN
    return None if tuple(chat.encode(whole)[: len(turn.header)]) == turn.header else NO_BOUNDARY
