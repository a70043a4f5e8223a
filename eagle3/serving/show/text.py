"""Tokens in visible form: parts of characters, line ends, control characters, other writing directions."""

from typing import Any

PART = "\ufffd"  # what a tokenizer decodes bytes to that are no whole character
CONTEXT = 4  # tokens decoded before a piece: some tokenizers drop a space at the start, characters have 4 bytes
MARKS = {"\n": "↵\n", "\r": "␍", "\t": "⇥"}


def piece(tokenizer: Any, before: list[int], token_id: int) -> str:
    """Return the text that a token adds to `before`, or its name if it adds no whole character."""
    known = tokenizer.decode(before[-CONTEXT:])
    text = tokenizer.decode([*before[-CONTEXT:], token_id])
    if not text.startswith(known):  # the token makes the bytes before it a character
        known = known.rstrip(PART)
    added = text[len(known) :] if text.startswith(known) else tokenizer.decode([token_id])
    if added and PART not in added:
        return added
    return str(tokenizer.convert_ids_to_tokens(token_id) or f"<{token_id}>")


def visible(text: str) -> str:
    """Mark line ends and tabs; write all else that does not print as an escape."""
    return "".join(MARKS.get(character) or _printed(character) for character in text)


def _printed(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()
