"""Keys of conf/prompts and its groups."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, BeforeValidator, Field, with_config
from typing_extensions import TypedDict

from eagle3.errors import InputError
from eagle3.settings.parts import Part, register_schema
from eagle3.settings.types import (
    MOST,
    STRICT,
    Count,
    CountOrZero,
    NotNegative,
    Places,
    PositiveShare,
    Seed,
    Settings,
    Share,
    Text,
    shown,
    text_or,
    wrong,
)

Action = Literal["drop", "mask", "keep"]  # of overlapping findings the first of these wins
Hashes = Annotated[int, Field(ge=1, le=1024)]  # of a signature: their product takes memory for each prompt
Words = Annotated[int, Field(ge=1, le=1000)]


Names = Annotated[Any, text_or(list[Text])]


@with_config(STRICT)
class Fields(TypedDict, total=False):
    """Columns of a row, by what they hold (eagle3/prompts/reading/shapes.py): a name, or some in their order."""

    id: Names
    license: Names
    source: Names
    model: Names
    messages: Names
    turns: Names
    prompt: Names
    context: Names
    system: Names
    choices: Names
    answer: Names
    role: Names
    content: Names
    finish_reason: Names
    chat_template_kwargs: Names
    part_of: Names
    attachments: Names


Roles = dict[Text, Literal["system", "user", "assistant", "tool"]]


@with_config(STRICT)
class OtherSource(TypedDict):
    """A source that is read and never kept."""

    path: Text
    name: NotRequired[Text | None]
    config: NotRequired[Text | None]
    split: NotRequired[Text]
    fields: NotRequired[Fields]
    roles: NotRequired[Roles]


@with_config(STRICT)
class KeptSource(OtherSource):
    license: NotRequired[Text | None]
    attribution: NotRequired[Text | None]
    limit: NotRequired[Count | None]


@dataclass(frozen=True, kw_only=True)
class ForbiddenSource(Settings):
    """Sources whose terms forbid training, by shell-like patterns on their names."""

    name: Text
    match: Annotated[list[Text], Field(min_length=1)]
    reason: Text


@dataclass(frozen=True, kw_only=True)
class LicenseSettings(Settings):
    """Licences and sources that may be used."""

    allowed: list[Text]
    allowed_terms: list[Text]
    aliases: dict[str, Text]
    free_of_credit: list[Text]
    cleared: list[Text]
    forbidden: list[ForbiddenSource]


@dataclass(frozen=True, kw_only=True)
class LengthSettings(Settings):
    """Bounds of characters of system and user turns together, and of the number of user turns."""

    min_characters: CountOrZero | None
    max_characters: CountOrZero | None
    min_turns: CountOrZero | None
    max_turns: CountOrZero | None

    def bounds(self) -> dict[str, tuple[int | None, int | None]]:
        """Return the lowest and the highest value of each unit."""
        return {unit: (getattr(self, f"min_{unit}"), getattr(self, f"max_{unit}")) for unit in ("characters", "turns")}

    def __post_init__(self) -> None:
        for unit, (low, high) in self.bounds().items():
            if low is not None and high is not None and low > high:
                raise InputError(
                    f"prompts.length.min_{unit}={low} is above prompts.length.max_{unit}={high}, so that no prompt "
                    f"passes; swap them"
                )


@dataclass(frozen=True, kw_only=True)
class LanguageSettings(Settings):
    """Languages that are kept."""

    allowed: Annotated[list[Text], Field(min_length=1)] | None
    unknown: Literal["keep", "refuse"]


@dataclass(frozen=True, kw_only=True)
class LeakSettings(Settings):
    """Benchmarks that no prompt may overlap with."""

    benchmarks: list[Annotated[Any, text_or(OtherSource)]]
    dropped_words: Words


@dataclass(frozen=True, kw_only=True)
class DuplicateSettings(Settings):
    """Bounds from which a prompt repeats another."""

    exact: bool
    near: bool
    threshold: PositiveShare
    shingle_words: Words
    bands: Hashes
    band_rows: Hashes
    comparisons: Count
    known: list[Text]


# --- traffic ---------------------------------------------------------------------------------------------------------


def _ascending(edges: list[float]) -> list[float]:
    if len(edges) < 2 or any(low >= high for low, high in pairwise(edges)):
        raise wrong("must list the lower edges of two or more bins in ascending order, e.g. [0, 100]")
    return edges


Edges = Annotated[list[NotNegative], AfterValidator(_ascending)]


class Bins(TypedDict, total=False):
    turns: Edges
    characters: Edges
    code_share: Edges
    language: list[Text]


@dataclass(frozen=True, kw_only=True)
class TrafficSettings(Settings):
    """The production traffic that prompts are drawn to look like."""

    sample: Text
    size: Count
    seed: Seed
    bins: Bins
    strata: Annotated[list[Literal["turns", "characters", "code_share", "language", "tools", "system_prompt"]],
                      Field(min_length=1)]  # fmt: skip

    def __post_init__(self) -> None:
        known = (*self.bins, "tools", "system_prompt")
        if any(self.strata.count(stratum) > 1 or stratum not in known for stratum in self.strata):
            raise InputError(
                f"prompts.traffic.strata={shown(self.strata)} must list features of prompts.traffic.bins, each once"
            )


def _mix(traffic: Any) -> Any:
    """Take the empty group of prompts/traffic=off for no mix."""
    return None if traffic == {} else traffic


# --- privacy ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PhoneSettings(Settings):
    """The countries whose phone numbers are found."""

    regions: list[Text]
    called_regions: list[Text]


@dataclass(frozen=True, kw_only=True)
class AllowedSettings(Settings):
    """Findings that are let through."""

    placeholders: bool
    values: list[Text]
    domains: list[Text]


@register_schema("eagle3.prompts.privacy.names.NameModel")
class NameModelSettings(TypedDict):
    path: Text
    file: Text
    threshold: Share
    actions: dict[Text, Action]
    labels: dict[Text, list[Text]]


@register_schema("eagle3.prompts.privacy.Privacy")
class PrivacySettings(TypedDict):
    policy: Literal["strict", "patterns", "off"]
    model: Part | None
    actions: NotRequired[dict[Text, Action | None]]
    phone: NotRequired[PhoneSettings | None]
    recognisers: NotRequired[dict[Text, Part]]
    allowed: NotRequired[AllowedSettings | None]


# --- the target's own prompts ----------------------------------------------------------------------------------------


def _not_blank(text: str) -> str:
    if not text.strip():
        raise wrong("must be a text that is not empty")
    return text


@dataclass(frozen=True, kw_only=True)
class FromTargetSettings(Settings):
    """How the target writes prompts itself, and how many of them are kept."""

    limit: Count | None
    share: Annotated[float, Field(gt=0, lt=1)] | None
    license: Text | None
    temperature: Annotated[float, Field(gt=0, le=100)]
    top_p: PositiveShare
    max_new_tokens: Annotated[int, Field(ge=1, le=2**24)]
    system_prompts: list[Annotated[str, AfterValidator(_not_blank)]]
    keep_system_prompts: bool
    turns: Annotated[int, Field(ge=1, le=100)]
    seed: Seed
    least_kept: PositiveShare


# --- all of it -------------------------------------------------------------------------------------------------------


def _one_path(path: Any) -> Any:
    if isinstance(path, list):
        raise wrong("must be one file or folder; several are a list in prompts.sources, e.g. [a.jsonl,b.jsonl]")
    return path


def _share_or_number(value: float) -> float:
    if not (0 < value < 1 or (value >= 1 and value == int(value))):
        raise wrong("must be a share of the prompts between 0 and 1, or a number of prompts, e.g. 0.1 or 400")
    return value


@dataclass(frozen=True, kw_only=True)
class PromptSettings(Settings):
    """All keys of conf/prompts. Conversations come from `path` alone, or from the list `sources`."""

    path: Annotated[Text | None, BeforeValidator(_one_path)]
    name: Text | None
    license: Text | None
    attribution: Text | None
    config: Text | None
    split: Text | None
    sources: Annotated[list[Annotated[Any, text_or(KeptSource)]], Field(min_length=1)] | None
    fields: Fields | None
    roles: Roles | None
    tools: Literal["refuse", "keep"]
    limit: Count | None
    held_out: Annotated[float, Field(le=MOST), AfterValidator(_share_or_number)] | None
    held_out_seed: Seed
    processes: Places | None
    chunk_mb: Annotated[float, Field(gt=0, le=4096)]
    licenses: LicenseSettings
    length: LengthSettings
    language: LanguageSettings
    decontamination: LeakSettings
    duplicates: DuplicateSettings
    privacy: Part
    traffic: Annotated[TrafficSettings | None, BeforeValidator(_mix)]
    from_target: FromTargetSettings | None

    def __post_init__(self) -> None:
        if self.from_target:
            self._require_number(self.from_target)
        size = self.traffic.size if self.traffic else None
        if size and self.limit is not None and self.limit < size:
            raise InputError(f"prompts.limit={self.limit} would cut the mix of prompts.traffic.size={size}; raise it")

    def _require_number(self, own: FromTargetSettings) -> None:
        """Raise InputError unless the settings say how many prompts the target writes."""
        mixed = self.path is not None or self.sources is not None
        if own.limit is not None and own.share is not None:
            raise InputError(
                f"prompts.from_target.limit={own.limit} and prompts.from_target.share={own.share:g} both say how many "
                f"prompts the target writes; leave one out"
            )
        if mixed and own.limit is None and own.share is None:
            raise InputError(
                "prompts.from_target.share=null and prompts.from_target.limit=null: with prompts of your own, say how "
                "many are by the target, e.g. prompts.from_target.share=0.5"
            )
        if own.share is not None and not mixed:
            raise InputError(
                f"prompts.from_target.share={own.share:g} is a share of all prompts, and there are no others; give "
                f"prompts.path=FILE too, or prompts.limit=N instead"
            )
        if not mixed and own.limit is None and self.limit is None:
            raise InputError(
                "prompts.limit=null: the target can write prompts without end; set the number, e.g. prompts.limit=10000"
            )
