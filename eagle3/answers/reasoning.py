"""The marks between which a target reasons, and what a server returns as the content of its message."""

from dataclasses import dataclass

# What families write around their reasoning; the content begins after the end mark.
KNOWN = (
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),  # gpt-oss
    ("<|channel>thought", "<channel|>"),  # Gemma 4
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A Reasoning
    ("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    ("<seed:think>", "</seed:think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("◁think▷", "◁/think▷"),  # Kimi
    ("[THINK]", "[/THINK]"),  # Magistral
    ("<think>", "</think>"),  # DeepSeek, Qwen, GLM, Nemotron and most others
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
)


@dataclass(frozen=True)
class Reasoning:
    """The two marks. A span of reasoning is open, closed, or was never begun."""

    start: str
    end: str

    def opened_by(self, generation_prompt: str) -> bool:
        return generation_prompt.rfind(self.start) > generation_prompt.rfind(self.end)

    def is_empty(self, text: str) -> bool:
        """Say whether a span holds no reasoning: a prompt closes an empty span to ask for none."""
        return not text.replace(self.start, "").replace(self.end, "").strip()

    def begins(self, answer: str) -> bool:
        return answer.lstrip().startswith(self.start)

    def behind_start(self, answer: str, prompt: str) -> str:
        """Cut off the start that the prompt has written already: many clients put it back before an answer."""
        if not self.begins(answer):
            return answer
        written = prompt[prompt.rindex(self.start) + len(self.start) :]
        return answer.lstrip().removeprefix(self.start).removeprefix(written)

    def is_one_span(self, answer: str) -> bool:
        """Tell whether reasoning ends once in the answer, after beginning at most once."""
        before, _, after = answer.partition(self.end)
        return self.end in answer and self.end not in after and self.start not in after and before.count(self.start) < 2

    def without_marks(self, answer: str) -> str:
        return answer.replace(self.start, "\n", 1).replace(self.end, "\n", 1)

    def content(self, answer: str) -> str:
        return answer.partition(self.end)[2].strip()


def find_reasoning(parser: str | list[str] | None, template: str) -> Reasoning | None:
    """Return the marks that `chat.reasoning_parser` names, or those that the template itself writes or looks for."""
    if isinstance(parser, list):
        return Reasoning(*parser)
    return next((Reasoning(start, end) for start, end in KNOWN if end in template), None)
