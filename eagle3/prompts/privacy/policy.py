"""The privacy check of a prompt: all its messages are read at once; what is found drops it, is masked, or is kept."""

import logging
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from eagle3.errors import InputError
from eagle3.prompts.checks import Verdict
from eagle3.prompts.privacy.allowed import Allowed
from eagle3.prompts.privacy.names import IN_PROSE, ONLY_BY_MODEL, REQUIRED, NameModel
from eagle3.prompts.privacy.recogniser import ACTIONS, Action, BatchRecogniser, Recogniser
from eagle3.prompts.reading.prompt import Prompt
from eagle3.prompts.reading.shapes import from_json
from eagle3.storage.files import sha256_json

log = logging.getLogger(__name__)

BETWEEN_MESSAGES = "\n\n"  # no number goes on over it, while the words of one message are context for the next

# One character for one, so that places stay places: digits of every script, full-width forms, dashes and blanks.
ASCII_FORMS: dict[int, str] = {
    **{ord(char): str(unicodedata.decimal(char)) for char in map(chr, range(128, 0x20000)) if char.isdecimal()},
    **{code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)},
    **dict.fromkeys((*range(0x2010, 0x2016), 0x2212, 0xAD), "-"),
    **dict.fromkeys((0xA0, *range(0x2000, 0x200E), 0x202F, 0x205F, 0x2060, 0x3000, 0xFEFF), " "),
}


class Found(NamedTuple):
    start: int
    end: int
    entity: str
    action: Action


class Privacy:
    """Refuses or masks prompts with personal data or secrets; counts what it found by entity, never what it was.

    What `allowed` lets through is counted as `ENTITY let through`.
    """

    name = "privacy"

    def __init__(
        self, *, policy: str, recognisers: Mapping[str, Recogniser], model: NameModel | None, allowed: Allowed | None
    ):
        self.policy = policy
        self.recognisers = list(recognisers.values())
        self.batched = [each for each in self.recognisers if isinstance(each, BatchRecogniser)]
        self.one_by_one = [each for each in self.recognisers if not isinstance(each, BatchRecogniser)]
        self.model = model
        self.allowed = allowed
        self._check_policy()

    def __call__(self, prompt: Prompt) -> Verdict:
        if self.policy == "off":
            return Verdict()
        found, passed = self._look(_whole(prompt))
        counts = Counter([item.entity for item in found] + [f"{item.entity} let through" for item in passed])
        if dropped := sorted({item.entity for item in found if item.action == "drop"}):
            return Verdict(reason=f"personal data: {', '.join(dropped)}", counts=counts)
        masks = [item for item in found if item.action == "mask"]
        if not masks:
            return Verdict(counts=counts)
        changed = _masked(prompt, masks)
        entities = ", ".join(sorted({item.entity for item in masks}))
        return Verdict(reason=None if changed else f"personal data in tools: {entities}", prompt=changed, counts=counts)

    def look_ahead(self, prompts: Iterable[Prompt]) -> None:
        """Let recognisers that read many texts at once read these, which are asked about next."""
        if self.batched and self.policy != "off":
            self.read_together(map(_whole, prompts))

    def masked(self, texts: Sequence[str]) -> list[str]:
        """Return the texts with all that is found masked, whatever is done with it: for people who look at rows."""
        self.read_together(texts)
        found = ([item._replace(action="mask") for item in self.find(text)] for text in texts)
        return [next(_masked_contents([text], masks)) for text, masks in zip(texts, found, strict=True)]

    def read_together(self, texts: Iterable[str]) -> None:
        """Give the texts to the recognisers that read many at once; `find` of one of them is then only looked up."""
        read = [readable(text) for text in texts] if self.batched else []
        for recogniser in self.batched:
            recogniser.look_ahead(read)

    def files(self) -> list[Path]:
        """List what recognisers and model read."""
        own = [file for recogniser in self.recognisers for file in recogniser.files()]
        return own + (self.model.files() if self.model else [])

    def made_with(self) -> list[str]:
        """Name programs and versions that recognisers find with, if they can change by themselves."""
        return [name for name in (recogniser.made_with() for recogniser in self.recognisers) if name is not None]

    def safe_id(self, id: str) -> str:
        """Hash an id that is personal data itself, such as an email address: ids are written of every row."""
        return id if self.policy == "off" or not self._look(id, self.one_by_one)[0] else _hashed(id)

    def safe_source(self, name: str) -> str:
        """Hash like safe_id, by patterns alone: a model takes datasets for names, and they have to be credited."""
        return name if self.policy == "off" or not self._matched(readable(name), self.one_by_one) else _hashed(name)

    def unseen(self) -> list[str]:
        """Return the entities that nothing here looks for, for warnings, the ledger and the report."""
        return ["all"] if self.policy == "off" else sorted(ONLY_BY_MODEL - self._of_model())

    def partly_seen(self) -> list[str]:
        """Return the entities of which patterns find some, and no model looks for the rest."""
        return [] if self.policy == "off" or IN_PROSE in self._of_model() else [f"{IN_PROSE} in prose"]

    def _of_model(self) -> set[str]:
        return set(self.model.actions if self.model else ())

    def _check_policy(self) -> None:
        missing = ", ".join(sorted(REQUIRED - self._of_model()))
        if self.policy == "strict" and missing:
            raise InputError(
                f"prompts.privacy.model={'null' if self.model is None else 'incomplete'}: the strict policy needs a "
                f"model that sees {missing}; give prompts/privacy/model=onnx prompts.privacy.model.path=FOLDER "
                f"(conf/prompts/privacy/model/onnx.yaml names one of 15 MB), or choose prompts/privacy=patterns, which "
                f"lets them pass"
            )
        if self.policy == "off":
            log.warning("prompts/privacy=off: personal data and secrets are NOT looked for")
        elif self.unseen() or self.partly_seen():
            log.warning(
                "prompts/privacy=%s does not see all: %s; a model that is asked for them does: prompts/privacy/model",
                self.policy,
                blind_spots(self.unseen(), self.partly_seen()),
            )

    def find(self, text: str) -> list[Found]:
        """Find everything, in order of place and without overlaps."""
        return self._look(text)[0]

    def _look(self, text: str, recognisers: list[Recogniser] | None = None) -> tuple[list[Found], list[Found]]:
        """Return what is found and what of it is let through, each in order of place and without overlaps."""
        text = readable(text)
        found = self._matched(text, self.recognisers if recognisers is None else recognisers)
        if self.model is not None:
            found += [Found(*span, entity, self.model.actions[entity]) for entity, span in self.model.find(text)]
        if not found or self.allowed is None:
            return _without_overlaps(found), []
        passed = [item for item in found if self.allowed(item.entity, text[item.start : item.end])]
        return _without_overlaps([item for item in found if item not in passed]), _without_overlaps(passed)

    def _matched(self, text: str, recognisers: Iterable[Recogniser]) -> list[Found]:
        """Return what these find in readable text, overlaps and all."""
        return [
            Found(*span, recogniser.entity, recogniser.action)
            for recogniser in recognisers
            for span in recogniser.find(text)
        ]


def blind_spots(unseen: Sequence[str], partly_seen: Sequence[str]) -> str:
    """Say in words what passes, for the warning and the report."""
    spots = [f"NOT seen and let through: {', '.join(unseen)}"] if unseen else []
    return "; ".join(spots + ([f"seen only in part: {', '.join(partly_seen)}"] if partly_seen else []))


def _whole(prompt: Prompt) -> str:
    return BETWEEN_MESSAGES.join(prompt.texts())


def readable(text: str) -> str:
    """Return the text as recognisers read it, of the same length."""
    return text if text.isascii() else text.translate(ASCII_FORMS)


def _hashed(name: str) -> str:
    return sha256_json(name)[:16]


def _without_overlaps(found: list[Found]) -> list[Found]:
    """Keep one of findings that overlap: what is dropped before masks, masks before what is kept, then the longest."""
    if len(found) < 2:
        return found
    masks = [item for item in found if item.action == "mask"]
    found = [item for item in found if item.action != "mask"] + _merged(masks)
    preferred = sorted(found, key=lambda item: (ACTIONS.index(item.action), item.start - item.end, item.start))
    taken = bytearray(max(item.end for item in found))
    chosen = []
    for item in preferred:
        if not any(taken[item.start : item.end]):
            taken[item.start : item.end] = b"\1" * (item.end - item.start)
            chosen.append(item)
    return sorted(chosen)


def _merged(masks: list[Found]) -> list[Found]:
    """Join masks that overlap to one over all of them, called what the longest is: no end of any stays readable."""
    groups: list[list[Found]] = []
    end = 0
    for mask in sorted(masks, key=lambda item: item.start):
        if not groups or mask.start >= end:
            groups.append([])
        groups[-1].append(mask)
        end = max(end, mask.end)
    longest = [max(group, key=lambda item: item.end - item.start) for group in groups]
    return [
        item._replace(start=group[0].start, end=max(mask.end for mask in group))
        for item, group in zip(longest, groups, strict=True)
    ]


def _masked(prompt: Prompt, masks: list[Found]) -> Prompt | None:
    """Return the prompt with its masks; None where a mask in its tools would leave no definitions."""
    contents = list(_masked_contents(prompt.texts(), masks))
    messages = [{**message, "content": text} for message, text in zip(prompt.messages, contents, strict=False)]
    if not prompt.tools:
        return prompt._replace(messages=messages)
    tools = from_json(contents[-1])  # a mask in place of a number is no JSON
    return prompt._replace(messages=messages, tools=tools) if tools else None


def _masked_contents(contents: Iterable[str], masks: list[Found]) -> Iterator[str]:
    """Yield each message with <ENTITY> in place of its masks; one that runs over several messages is put in each."""
    offset = 0
    for content in contents:
        parts, position = [], 0
        for mask in masks:
            start, end = max(mask.start - offset, 0), min(mask.end - offset, len(content))
            if start < end:
                parts += [content[position:start], f"<{mask.entity}>"]
                position = end
        yield "".join([*parts, content[position:]])
        offset += len(content) + len(BETWEEN_MESSAGES)
