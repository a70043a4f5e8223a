"""The target's tokenizer without its model: counts the tokens of texts, decodes token ids."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from eagle3.errors import InputError


@cache
def tokenizer(folder: str) -> Any:
    """Load tokenizer.json from the target's folder: once in each process, without PyTorch."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(tokenizer_file(folder)))
    except Exception:  # the library raises no narrower class
        raise InputError(
            f"prompts.tokenizer={folder} has no tokenizer.json that can be read; name the target's folder"
        ) from None


def tokenizer_file(folder: str) -> Path:
    return Path(folder).expanduser() / "tokenizer.json"


def count_tokens(folder: str, text: str) -> int:
    return len(tokenizer(folder).encode(text, add_special_tokens=False).ids)


def decoded(folder: str, ids: Sequence[int]) -> str | None:
    """Return the text of ids; None if one is unknown, or special as in a rendered chat."""
    vocabulary = tokenizer(folder)
    special = vocabulary.get_added_tokens_decoder()
    if not all(id < vocabulary.get_vocab_size() and not (id in special and special[id].special) for id in ids):
        return None
    return vocabulary.decode(list(ids), skip_special_tokens=False)
