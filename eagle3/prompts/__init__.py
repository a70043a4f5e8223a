"""Raw conversations → clean prompts. Does not import PyTorch, so that the stage starts fast anywhere.

Reading conversations in JSON needs no library of the extra `prompts`; the stage and other formats do.
"""

from eagle3.prompts.reading.prompt import Prompt, Refused
from eagle3.prompts.reading.rows import read_prompts
from eagle3.prompts.reading.sources import Source, configured_sources, source_at

LIBRARIES = (  # of the extra `prompts`, by import name
    "datasets", "datasketch", "duckdb", "license_expression", "loky", "phonenumbers", "publicsuffixlist", "py3langid",
    "pyarrow", "regex", "stdnum", "xxhash",
)  # fmt: skip

__all__ = ["LIBRARIES", "Prompt", "Refused", "Source", "configured_sources", "read_prompts", "source_at"]
