"""Raw conversations → clean prompts. Free of torch, so that the stage runs and starts fast anywhere."""

from eagle3.prompts.conversation import Refused
from eagle3.prompts.prompt import Prompt
from eagle3.prompts.reading import read_prompts
from eagle3.prompts.sources import Source, configured_sources, plain_source
from eagle3.prompts.stage import prepare_prompts

__all__ = [
    "Prompt",
    "Refused",
    "Source",
    "configured_sources",
    "plain_source",
    "prepare_prompts",
    "read_prompts",
]
