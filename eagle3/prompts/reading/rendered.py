"""Conversations that a chat template has already rendered into one text: a template applied to it would nest.

A text is one if a marker that opens a turn begins it, begins a line or follows another marker, and a later marker ends
that turn or opens the assistant's. Markers in code are a user's example, and so is one alone.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from eagle3.prompts.reading.prompt import Prompt, Verdict

RENDERED = "text with the turns of a rendered conversation"
CONTROL_TOKEN = "control token of the target in a turn"

USER, ASSISTANT = "user|human|system|developer|prompter|prompt|userprompt", "assistant|model|bot|chatbot|gpt|ai|answer"
BAR = r"[|\uff5c]"
# What opens a turn, and what ends it or opens the next.
MARKERS = {
    # Qwen, OLMo 2 and all others with ChatML; Kimi
    r"<\|im_(?:start|user|system)\|>": r"<\|im_(?:end|start|assistant|middle)\|>",
    # Llama 3 and 4, Granite, gpt-oss
    r"<\|(?:start_header_id|header_start|start_of_role|start|begin)\|>\w+": (
        r"<\|(?:end_header_id|header_end|end_of_role|message|channel|end)\|>"
    ),
    # Zephyr, Phi, GLM, OLMo, Falcon 3, Command, DeepSeek, EXAONE, Hunyuan, Apertus
    rf"[<\[]{BAR}(?:\w*_)?(?:{USER})(?:_\w*)?{BAR}[>\]](?![ \t])": (
        rf"[<\[]{BAR}(?:\w*_)?(?:{ASSISTANT}|end[^|\uff5c\s]*|eot\w*)(?:_\w*)?{BAR}[>\]]|</s>|<eoh>"
    ),
    # Jamba, Jais, Baize: the same with a blank
    rf"[<\[]{BAR}(?:{USER}){BAR}[>\]][ \t]": rf"(?:^|(?<=[>\]]))[<\[]{BAR}(?:{ASSISTANT}){BAR}[>\]]",
    r"<start_of_turn>\w+|<\|turn>\w+": r"<end_of_turn>|<start_of_turn>|<turn\|>|<\|turn>",  # Gemma
    r"\[INST\]|\[SYSTEM_PROMPT\]|<<SYS>>": r"\[/INST\]|\[/SYSTEM_PROMPT\]|<</SYS>>",  # Llama 2, Mistral
    r"<seed:bos>\w+": r"<seed:eos>|<seed:bos>",
    r"<extra_id_[01]>\w+": r"<extra_id_1>",  # Nemotron 4
    r"<SPECIAL_1[01]>\w+": r"<SPECIAL_1[12]>",  # Nemotron Nano 2
    r"<role>(?:HUMAN|SYSTEM)</role>": r"<role>ASSISTANT</role>",  # Ling
    r"\]~b\]\w+": r"\[e~\[",  # MiniMax
    # Guanaco, Solar, Alpaca; StarCoder2
    r"###? ?(?:(?:Human|User|Instruction):|Instruction$)": r"^###? ?(?:(?:Assistant|Response):|Response\s*\Z)",
    r"GPT4 Correct User:": r"GPT4 Correct Assistant:",  # OpenChat
    r"\[Round \d+\]\s+(?:问\uff1a|USER:)": r"^答\uff1a|ASSISTANT:",  # ChatGLM, LongCat
    r"<(?:user|human)>:": r"<(?:bot|assistant)>:",  # OIG and others
    r"<用户>|<_user>|<C_Q>": r"<AI>|<_bot>|<C_A>",  # MiniCPM, TeleChat, Baichuan M1
    r"<reserved_10[26]>": r"<reserved_10[37]>",  # Baichuan
}
BEGINS = r"(?:^[ \t]*|(?<=[>\]]))"
STRUCTURED = [
    (re.compile(f"{BEGINS}(?:{opens})", re.M | re.I), re.compile(ends, re.M | re.I)) for opens, ends in MARKERS.items()
]
SIGNS = ("<", "[", "]", "##", "gpt4")  # each of these markers has one; most texts have none, and cost no ten searches
# Plain names, as Vicuna, Falcon and many transcripts have them. A user may quote a transcript inside a question:
# elsewhere than in a column of documents, the text must begin with one, or end where an answer would begin.
NAMED = [
    (re.compile(opens, re.MULTILINE), re.compile(ends, re.MULTILINE))
    for opens, ends in {
        r"(?:^|(?<=[\s>]))USER:\s": r"(?<=\s)ASSISTANT:",
        r"(?:^|(?<=>))(?:Human|User|用户)[:\uff1a]": r"^(?:Assistant|AI|Bot|Falcon|助手)[:\uff1a]",
        r"^<human>:": r"^<bot>:",
        r"^Instruct: ": r"^Output:",  # Phi-2
        r"^user\n": r"^assistant$",  # ChatML and Llama 3 without their special tokens
        r"^###? ?(?:Human|Assistant):": "",  # the name is enough
    }.items()
]
AT_AN_END = re.compile(
    r"\A\s*(?:<s>|<\|begin_of_sentence\|>)?\s*"
    r"(?:(?:USER|Human|User|用户)[:\uff1a]|<human>:|Instruct:|system\n|user\n|###? ?Human:|A chat between )"
    r"|(?:(?:ASSISTANT|Assistant|AI|Bot|Falcon|<bot>|Output|助手)[:\uff1a]|</s>|^assistant)\s*\Z",
    re.MULTILINE,
)
CODE = re.compile(r"```.*?```|~~~.*?~~~|`[^`\n]+`", re.DOTALL)
MARK = re.compile(r"[<\[][^\s<>\[\]]{1,80}[>\]]")  # the form of nearly all control tokens


def is_rendered(text: str, *, is_document: bool) -> bool:
    """Tell whether a text is a rendered conversation; is_document: it is from a column that may hold whole ones."""
    prose = CODE.sub(" ", text)
    lowered = prose.lower()
    if any(sign in lowered for sign in SIGNS) and _has_turns(prose, STRUCTURED):
        return True
    return (is_document or AT_AN_END.search(prose) is not None) and _has_turns(prose, NAMED)


def _has_turns(text: str, markers: Iterable[tuple[re.Pattern[str], re.Pattern[str]]]) -> bool:
    return any((opened := opens.search(text)) and ends.search(text, opened.end()) for opens, ends in markers)


@dataclass(frozen=True)
class TargetMarkers:
    """What the target's template and tokenizer write between turns.

    between: the text from the end of a user turn to the start of the answer, without blanks around it; tokens: the
    control tokens that a text becomes wherever it holds theirs.
    """

    between: str
    tokens: frozenset[str]

    def plain(self) -> Mapping[str, Any]:
        return {"between": self.between, "tokens": sorted(self.tokens)}


class TargetMarkersCheck:
    """Refuses a prompt with the target's own marks in a system or user turn: its tokenizer would take them for real."""

    name = "reading"

    def __init__(self, markers: TargetMarkers):
        self.markers = markers
        self.odd = [token for token in markers.tokens if not MARK.fullmatch(token)]

    def __call__(self, prompt: Prompt) -> Verdict:
        for message in prompt.messages:
            if message["role"] != "assistant":
                prose = CODE.sub(" ", message["content"])
                if self.markers.between and self.markers.between in prose:
                    return Verdict(reason=RENDERED)
                if token := next(iter(self._tokens(prose)), None):
                    return Verdict(reason=CONTROL_TOKEN, name=token)
        return Verdict()

    def _tokens(self, text: str) -> Iterable[str]:
        yield from (mark for mark in MARK.findall(text) if mark in self.markers.tokens)
        yield from (token for token in self.odd if token in text)
