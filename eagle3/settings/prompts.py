"""Keys of conf/prompts and its groups."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, BeforeValidator, Field, with_config
from typing_extensions import TypedDict

from eagle3.errors import InputError
from eagle3.settings.types import (
    STRICT,
    Count,
    CountOrZero,
    NotNegative,
    Part,
    Places,
    Seed,
    Settings,
    Share,
    Text,
    fault,
    part_of,
    text_or,
    validated,
    wrong,
)

Action = Literal["drop", "mask", "keep"]
Hashes = Annotated[int, Field(ge=1, le=1024)]  # of a signature: their product takes memory for each prompt
Words = Annotated[int, Field(ge=1, le=1000)]


def _names(value: Any) -> Any:
    return validated(Text if isinstance(value, str) else list[Text], value)


Names = Annotated[Any, AfterValidator(_names)]


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
    history: Names
    system: Names
    answer: Names
    role: Names
    content: Names
    finish_reason: Names
    part_of: Names
    beside: Names
    token_ids: Names


Roles = dict[Text, Literal["system", "user", "assistant", "tool"]]


@with_config(STRICT)
class OtherSource(TypedDict):
    """A source that is read and never kept."""

    path: Text
    name: NotRequired[Text | None]
    split: NotRequired[Text]
    fields: NotRequired[Fields]
    roles: NotRequired[Roles]


@with_config(STRICT)
class Source(OtherSource):
    license: NotRequired[Text | None]
    attribution: NotRequired[Text | None]
    limit: NotRequired[Count | None]


class ForbiddenSource(TypedDict):
    name: Text
    match: Annotated[list[Text], Field(min_length=1)]
    reason: Text


class Licenses(TypedDict):
    allowed: list[Text]
    allowed_terms: list[Text]
    aliases: dict[str, Text]
    free_of_credit: list[Text]
    cleared: list[Text]
    forbidden: list[ForbiddenSource]


@dataclass(frozen=True, kw_only=True)
class LengthSettings(Settings):
    min_characters: CountOrZero | None
    max_characters: CountOrZero | None
    min_turns: CountOrZero | None
    max_turns: CountOrZero | None
    min_tokens: CountOrZero | None
    max_tokens: CountOrZero | None

    def bounds(self) -> dict[str, tuple[int | None, int | None]]:
        """Return the lowest and the highest value of each unit."""
        units = ("characters", "turns", "tokens")
        return {unit: (getattr(self, f"min_{unit}"), getattr(self, f"max_{unit}")) for unit in units}

    def __post_init__(self) -> None:
        for unit, (low, high) in self.bounds().items():
            if low is not None and high is not None and low > high:
                raise InputError(
                    f"prompts.length.min_{unit}={low} is above prompts.length.max_{unit}={high}, so that no prompt "
                    f"passes; swap them"
                )


@dataclass(frozen=True, kw_only=True)
class DetectorSettings(Settings):
    read_characters: Count
    min_bytes: CountOrZero
    min_confidence: Share


class Language(TypedDict):
    allowed: Annotated[list[Text], Field(min_length=1)] | None
    unknown: Literal["keep", "refuse"]
    detector: DetectorSettings


class Leaks(TypedDict):
    benchmarks: list[Annotated[Any, text_or(OtherSource)]]
    folder: Text | None
    dropped_words: Words
    reported_words: Words


def _reported_first(leaks: Leaks) -> Leaks:
    if leaks["reported_words"] > leaks["dropped_words"]:
        rule = f"must be at most prompts.leaks.dropped_words={leaks['dropped_words']}"
        raise fault("reported_words", value=leaks["reported_words"], rule=rule)
    return leaks


@dataclass(frozen=True, kw_only=True)
class DuplicateSettings(Settings):
    exact: bool
    near: bool
    threshold: Annotated[float, Field(gt=0, le=1)]
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


class FineBins(TypedDict, total=False):
    turns: Edges
    characters: Edges
    code_share: Edges


class Bins(FineBins, total=False):
    language: list[Text]


def _given(size: Any) -> Any:
    if size is None:
        raise wrong("says how many prompts to draw; set it, e.g. to 50000")
    return size


@dataclass(frozen=True, kw_only=True)
class TrafficSettings(Settings):
    sample: Text | None
    histogram: Text | None
    size: Annotated[Count, BeforeValidator(_given)]
    seed: Seed
    bins: Bins
    fine_bins: FineBins
    strata: Annotated[list[Literal["turns", "characters", "code_share", "language", "tools", "system_prompt"]],
                      Field(min_length=1)]  # fmt: skip
    on_shortfall: Literal["warn", "fail"]
    allowed_shortfall: Share
    tolerance: Annotated[float, Field(gt=0, le=1)]
    sweeps: Annotated[int, Field(ge=1, le=100_000)]

    def __post_init__(self) -> None:
        if (self.sample is None) == (self.histogram is None):
            raise InputError(
                f"prompts.traffic.sample={self.sample} and prompts.traffic.histogram={self.histogram}: set one of "
                f"them, e.g. to production.jsonl"
            )
        known = (*self.bins, "tools", "system_prompt")
        if any(self.strata.count(stratum) > 1 or stratum not in known for stratum in self.strata):
            raise InputError(
                f"prompts.traffic.strata={self.strata} must list features of prompts.traffic.bins, each once"
            )


def _mix(traffic: Any) -> TrafficSettings | None:
    """Check a mix; prompts/traffic=off leaves the group empty."""
    return None if traffic in (None, {}) else validated(TrafficSettings, traffic)


# --- privacy ---------------------------------------------------------------------------------------------------------


@with_config(STRICT)
class Phone(TypedDict):
    regions: list[Text]
    called_regions: list[Text]


@with_config(STRICT)
class Allowed(TypedDict):
    placeholders: bool
    values: list[Text]
    patterns: list[Text]
    domains: list[Text]


@part_of("eagle3.prompts.privacy.names.NameModel")
class NameModel(TypedDict):
    path: Text
    file: Text
    threshold: Share
    actions: dict[Text, Action]
    labels: dict[Text, list[Text]]


@part_of("eagle3.prompts.privacy.Privacy")
class Privacy(TypedDict):
    policy: Literal["strict", "patterns", "off"]
    model: Part | None
    actions: NotRequired[dict[Text, Action | None]]
    phone: NotRequired[Phone | None]
    kingfisher: NotRequired[Text | None]
    recognisers: NotRequired[dict[Text, Part]]
    allowed: NotRequired[Allowed | None]


# --- all of it -------------------------------------------------------------------------------------------------------


def _one_path(path: Any) -> Any:
    if isinstance(path, list):
        raise wrong("must be one file or folder; several are a list in prompts.sources, e.g. [a.jsonl,b.jsonl]")
    return path


class Prompts(TypedDict):
    path: Annotated[Text | None, BeforeValidator(_one_path)]
    name: Text | None
    license: Text | None
    attribution: Text | None
    split: Text | None
    limit: Count | None
    sources: Annotated[list[Annotated[Any, text_or(Source)]], Field(min_length=1)] | None
    fields: Fields
    roles: Roles
    tokenizer: Text | None
    tools: Literal["refuse", "keep"]
    licenses: Licenses
    length: LengthSettings
    language: Language
    leaks: Annotated[Leaks, AfterValidator(_reported_first)]
    duplicates: DuplicateSettings
    privacy: Part
    traffic: Annotated[Any, AfterValidator(_mix)]
    refused_sample: Annotated[int, Field(ge=0, le=1000)]
    processes: Places | None
    chunk_mb: Annotated[float, Field(gt=0, le=4096)]


def _whole(prompts: Prompts) -> Prompts:
    for key, tokens in zip(("min_tokens", "max_tokens"), prompts["length"].bounds()["tokens"], strict=True):
        if tokens is not None and prompts["tokenizer"] is None:
            rule = f"counts the tokens of prompts.length.{key}={tokens}; name the target's folder"
            raise fault("tokenizer", value=None, rule=rule)
    traffic, limit = prompts["traffic"], prompts["limit"]
    if traffic and limit is not None and limit < traffic.size:
        raise fault("limit", value=limit, rule=f"would cut the mix of prompts.traffic.size={traffic.size}")
    return prompts


WholePrompts = Annotated[Prompts, AfterValidator(_whole)]
