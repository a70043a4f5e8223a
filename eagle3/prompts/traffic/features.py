"""What the traffic mix looks at in a prompt, as numbers of fixed width."""

import re

import numpy as np

from eagle3.prompts.filters import prompt_characters, user_turns
from eagle3.prompts.language import LanguageDetector, split_code
from eagle3.prompts.reading.prompt import Prompt

# One row of the columns that the scan stores: 19 bytes, and free of bins, so that other bins need no other scan.
MEASURED = np.dtype(
    [
        ("turns", "u2"),  # user turns
        ("characters", "u4"),  # of system and user turns and of tools
        ("code_share", "f4"),  # of the user turns' characters
        ("language", "S7"),  # ISO 639, or `unknown`
        ("tools", "?"),  # tools beside the conversation, or defined in a system or user turn
        ("system_prompt", "?"),
    ]
)
NUMERIC = ("turns", "characters", "code_share")
FLAGS = ("tools", "system_prompt")

# How chat templates and agents write tools down: Hermes and Qwen, Mistral, the JSON of OpenAI, Llama and Anthropic.
TOOL_DEFINITIONS = re.compile(
    r'<tools>|<functions>|\[AVAILABLE_TOOLS\]|"type":\s?"function"|"parameters":\s?\{|"input_schema":\s?\{'
)


def measure(prompt: Prompt, detector: LanguageDetector) -> tuple[int, int, float, str, bool, bool]:
    """Return a row of MEASURED. Imported answers count for nothing: traffic is what comes in."""
    turns = user_turns(prompt)
    split = split_code(turns)
    asked = [message for message in prompt.messages if message["role"] != "assistant"]
    return (
        min(len(turns), np.iinfo("u2").max),
        min(prompt_characters(prompt), np.iinfo("u4").max),
        split.code_share,
        detector(split.prose),
        bool(prompt.tools) or any(TOOL_DEFINITIONS.search(message["content"]) for message in asked),
        any(message["role"] == "system" for message in asked),
    )
