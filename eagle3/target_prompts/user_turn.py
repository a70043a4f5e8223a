"""A user's turn: what the chat template writes before and after its text, and why a text in its place is no prompt.

The template's own is found by rendering two texts. Duplicates, languages, … are for the prompts stage.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

from eagle3.answers.chat import SENTINEL, Chat, Messages, RefusedConversation, common_start
from eagle3.engine.endpoint import Answer
from eagle3.errors import InputError

# Two texts of other lengths, beginnings and ends: what both renderings have in common is the template's own.
TEXTS = (SENTINEL, "quiz 7: so why is it?")
REWRITTEN = "the chat template changes, moves or repeats the text of a user turn"
NO_BOUNDARY = "the text before a user's joins with it to other tokens"
NO_END = "the template ends a user turn with text, not with a token of its own"
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


@dataclass(frozen=True)
class UserTurn:
    """A place for a user's text: the template's text around it, the ids before it, and the token that ends it."""

    before: str
    after: str
    header: tuple[int, ...]
    end: int


@lru_cache(maxsize=256)  # thousands of prompts begin in the same way
def first_user_turn(chat: Chat, system: str | None) -> UserTurn:
    """Return the place of a conversation's first user text, after a system prompt or the template's own."""
    return user_turn(chat, [] if system is None else [{"role": "system", "content": system}])


def user_turn(chat: Chat, before: Messages) -> UserTurn:
    """Return the place of the user's text that follows these messages. Raises RefusedConversation if there is none."""
    rendered = [chat.prompt([*before, {"role": "user", "content": text}]) for text in TEXTS]
    places = {tuple(whole.split(text)) for whole, text in zip(rendered, TEXTS, strict=True)}
    if len(places) != 1 or len(place := places.pop()) != 2:
        raise RefusedConversation(REWRITTEN)
    head, tail = place
    header = _header(chat, head, list(map(chat.encode, rendered)))
    return UserTurn(head, tail, tuple(header), _end(chat, tail))


def _header(chat: Chat, head: str, rendered: list[list[int]]) -> list[int]:
    """Return the ids of the template's text before the user's, as they are in all that was rendered.

    White space at its end may belong to the first token of the user's text: then the target writes it."""
    header = common_start(*rendered)
    text = chat.decode(header)
    if head.startswith(text):
        rest = head[len(text) :]
    else:  # SentencePiece: a space that is not in the template
        alone = chat.encode(head)
        header = common_start(header, alone)
        rest = chat.decode(alone[len(header) :])
    if rest.strip():
        raise RefusedConversation(NO_BOUNDARY)
    return header


def require_user_turns(chat: Chat, system_prompts: Sequence[str]) -> None:
    """Raise InputError if the target's template has no place for a user's text that can be found."""
    systems: Sequence[str | None] = system_prompts or [None]
    for system in systems:
        try:
            first_user_turn(chat, system)
        except RefusedConversation as refusal:
            where = "" if system is None else " after a prompt of prompts.from_target.system_prompts"
            raise InputError(
                f"prompts=from_target: the target's chat template has no user turn that it can write{where} "
                f"({refusal}); give another template with chat.template=FILE.jinja, or prompts with prompts.path=FILE"
            ) from None


@lru_cache(maxsize=8)
def own_tokens(chat: Chat) -> frozenset[int]:
    """Return the ids of tokens that stand for no text: control tokens, and others that the template writes.

    Some tokenizers have added tokens for runs of spaces or for HTML tags, which users write, too."""
    added, written = chat.tokenizer.added_tokens_decoder, set[int]()
    roles = ("system", "user", "assistant")
    for turns in (roles[1:], roles[:2], roles):
        messages = [{"role": role, "content": SENTINEL} for role in turns]
        with suppress(RefusedConversation):
            for prompts in (False, True):
                written.update(chat.encode(chat.render(messages, add_generation_prompt=prompts)))
    return frozenset(chat.control_ids).union(id for id in written if id in added and added[id].content.strip())


def _end(chat: Chat, tail: str) -> int:
    ids, own = chat.encode(tail), own_tokens(chat)
    first = next((place for place, token in enumerate(ids) if token in own), None)
    if first is None or chat.decode(ids[:first]).strip():
        raise RefusedConversation(NO_END)
    return ids[first]


# --- texts that the target wrote as a user ---


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
