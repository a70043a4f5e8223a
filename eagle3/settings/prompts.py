"""Keys of conf/prompts and its groups."""

from itertools import pairwise
from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, BeforeValidator, Field, with_config
from typing_extensions import TypedDict

from eagle3.settings.types import (
    STRICT,
    Count,
    CountOrZero,
    NotNegative,
    Part,
    Places,
    Seed,
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


class Length(TypedDict):
    min_characters: CountOrZero | None
    max_characters: CountOrZero | None
    min_turns: CountOrZero | None
    max_turns: CountOrZero | None
    min_tokens: CountOrZero | None
    max_tokens: CountOrZero | None


def _in_order(length: Length) -> Length:
    for unit in ("characters", "turns", "tokens"):
        low, high = length[f"min_{unit}"], length[f"max_{unit}"]  # type: ignore[literal-required]
        if low is not None and high is not None and low > high:
            rule = f"is above prompts.length.max_{unit}={high}, so that no prompt passes; swap them"
            raise fault(f"min_{unit}", value=low, rule=rule)
    return length


class Detector(TypedDict):
    read_characters: Count
    min_bytes: CountOrZero
    min_confidence: Share


class Language(TypedDict):
    allowed: Annotated[list[Text], Field(min_length=1)] | None
    unknown: Literal["keep", "refuse"]
    detector: Detector


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


class Duplicates(TypedDict):
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


@with_config(STRICT)
class Traffic(TypedDict):
    sample: Text | None
    histogram: Text | None
    size: Count | None
    seed: Seed
    bins: Bins
    fine_bins: FineBins
    strata: Annotated[list[Literal["turns", "characters", "code_share", "language", "tools", "system_prompt"]],
                      Field(min_length=1)]  # fmt: skip
    on_shortfall: Literal["warn", "fail"]
    allowed_shortfall: Share
    tolerance: Annotated[float, Field(gt=0, le=1)]
    sweeps: Annotated[int, Field(ge=1, le=100_000)]


def _mix(traffic: dict[str, Any]) -> dict[str, Any]:
    """Check a mix that is asked for: prompts/traffic=off leaves the group empty."""
    if not traffic:
        return traffic
    validated(Traffic, traffic)
    if (traffic["sample"] is None) == (traffic["histogram"] is None):
        rule = f"and prompts.traffic.histogram={traffic['histogram']!r}: set one of them, e.g. to production.jsonl"
        raise fault("sample", value=traffic["sample"], rule=rule)
    if traffic["size"] is None:
        raise fault("size", value=None, rule="says how many prompts to draw; set it, e.g. to 50000")
    strata = traffic["strata"]
    for stratum in strata:
        if strata.count(stratum) > 1 or stratum not in (*traffic["bins"], "tools", "system_prompt"):
            raise fault("strata", value=strata, rule="must list features of prompts.traffic.bins, each once")
    return traffic


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
    length: Annotated[Length, AfterValidator(_in_order)]
    language: Language
    leaks: Annotated[Leaks, AfterValidator(_reported_first)]
    duplicates: Duplicates
    privacy: Part
    traffic: Annotated[dict[str, Any], AfterValidator(_mix)] | None
    refused_sample: Annotated[int, Field(ge=0, le=1000)]
    processes: Places | None
    chunk_mb: Annotated[float, Field(gt=0, le=4096)]


def _whole(prompts: Prompts) -> Prompts:
    for key in ("min_tokens", "max_tokens"):
        tokens = prompts["length"][key]  # type: ignore[literal-required]
        if tokens is not None and prompts["tokenizer"] is None:
            rule = f"counts the tokens of prompts.length.{key}={tokens}; name the target's folder"
            raise fault("tokenizer", value=None, rule=rule)
    traffic, limit = prompts["traffic"], prompts["limit"]
    if traffic and limit is not None and traffic["size"] is not None and limit < traffic["size"]:
        raise fault("limit", value=limit, rule=f"would cut the mix of prompts.traffic.size={traffic['size']}")
    return prompts


WholePrompts = Annotated[Prompts, AfterValidator(_whole)]
