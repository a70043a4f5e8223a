"""Keys of serve.py: a schema for each action, which conf/action names."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field
from typing_extensions import TypedDict

from eagle3.draft_shape import Shape, checked_draft_shape
from eagle3.errors import InputError
from eagle3.settings.engine import Address, DraftTokens, DraftWindow, LaunchSettings, Seconds, Steps, Temperature, TopK
from eagle3.settings.parts import Part
from eagle3.settings.precomputing import ChatSettings, NewTokens, TargetSettings
from eagle3.settings.prompts import Fields
from eagle3.settings.types import Count, CountOrZero, NotNegative, PositiveShare, Seed, Settings, Text, fault

Concurrency = Annotated[int, Field(ge=1, le=100_000)]
Turns = Literal["all", "first"]
Repeats = Annotated[int, Field(ge=1, le=10_000)]
RepeatsOrNone = Annotated[int, Field(ge=0, le=10_000)]


@dataclass(frozen=True, kw_only=True)
class PromptFile(Settings):
    """Conversations to measure on."""

    path: Text | None
    config: Text | None
    split: Text | None
    fields: Fields
    turns: Turns


@dataclass(frozen=True, kw_only=True)
class GivenPrompts(PromptFile):
    """Conversations that must be given."""

    path: Text


@dataclass(frozen=True, kw_only=True)
class CheckSettings(Settings):
    """Requirements on a head before it is served."""

    min_accept_length: Annotated[float, Field(ge=0, le=65)] = 1.0
    max_difference: NotNegative = math.inf
    questions: Annotated[list[Text], Field(min_length=1)] = field(default_factory=list)


Side = Literal["plain", "head"]  # the target's server without and with the head
SIDES: tuple[Side, ...] = get_args(Side)


KEYS_OF_SAMPLING = ("temperature", "top_p", "top_k", "max_new_tokens")


def _sampling(sampling: dict[str, Any]) -> dict[str, Any]:
    if twice := sorted(sampling.keys() & {*KEYS_OF_SAMPLING}):
        raise fault(twice[0], value=sampling[twice[0]], rule=f"has a key of its own; set {twice[0]} instead")
    if sampling.get("ignore_eos"):
        raise fault(
            "ignore_eos", value=sampling["ignore_eos"],
            rule="would measure what a target says after its end of turn, which nobody reads and no head was trained "
            "on; leave it out",
        )  # fmt: skip
    return sampling


@dataclass(frozen=True, kw_only=True)
class BenchSettings(Settings):
    """Loads that a bench run measures."""

    prompts: Annotated[dict[Text, Text], Field(min_length=1)] | None
    concurrency: Annotated[list[Concurrency], Field(min_length=1)]
    requests_per_place: Annotated[int, Field(ge=2, le=10_000)]
    repeats: Repeats
    starts: Repeats
    warmup: RepeatsOrNone
    sampling: Annotated[dict[Text, Any], AfterValidator(_sampling)] | None
    timeout_s: Seconds
    plain_url: Address | None
    head_url: Address | None

    def __post_init__(self) -> None:
        if self.starts > 1 and self.urls:
            named = ", ".join(f"bench.{side}_url" for side in self.urls)
            raise InputError(f"bench.starts={self.starts}: servers that run are not started again; leave out {named}")

    @property
    def urls(self) -> dict[Side, str]:
        """Servers that are already running."""
        given: dict[Side, str | None] = {"plain": self.plain_url, "head": self.head_url}
        return {side: url.rstrip("/") for side, url in given.items() if url is not None}


class Assumed(TypedDict):
    compute_bound_tokens: NotNegative
    step: NotNegative


@dataclass(frozen=True, kw_only=True)
class TuneSettings(Settings):
    """Settings that tune chooses among, and how it does."""

    concurrency: Concurrency
    loads: Annotated[list[Concurrency], Field(min_length=1)] | None
    steps: Annotated[list[Steps], Field(min_length=1)]
    topk: Annotated[list[TopK], Field(min_length=1)]
    draft_tokens: list[DraftTokens]
    draft_window: DraftWindow | None
    batch_size: Count
    timed: CountOrZero
    requests_per_place: RepeatsOrNone
    warmup: RepeatsOrNone
    timeout_s: Seconds
    assumed: Assumed

    @property
    def all_loads(self) -> list[int]:
        """The numbers of concurrent requests that settings are timed at."""
        return sorted(set(self.loads or [self.concurrency]))


@dataclass(frozen=True, kw_only=True)
class DraftShape(Settings):
    """The shape of the drafts."""

    steps: Steps
    topk: TopK
    draft_tokens: DraftTokens | None

    def __post_init__(self) -> None:
        """Raise InputError for a shape that SGLang would change or refuse."""
        checked_draft_shape(self.steps, self.topk, self.draft_tokens)

    @property
    def shape(self) -> Shape:
        return checked_draft_shape(self.steps, self.topk, self.draft_tokens)


@dataclass(frozen=True, kw_only=True)
class Drafting(DraftShape):
    """The shape of the drafts, and the window that the head attends to."""

    draft_window: DraftWindow | None


@dataclass(frozen=True, kw_only=True)
class TokenSampling(Settings):
    """How the target chooses its tokens. In lists, top_p and top_k may be left out."""

    temperature: Temperature
    top_p: PositiveShare = 1.0  # all
    top_k: CountOrZero = 0  # all

    def __str__(self) -> str:
        if not self.temperature:
            return "greedy"
        limits = [f"top-p {self.top_p:g}"] if self.top_p < 1 else []
        return ", ".join([f"T = {self.temperature:g}", *limits, *([f"top-k {self.top_k}"] if self.top_k else [])])

    def for_server(self, max_new_tokens: int, stop_ids: Iterable[int]) -> dict[str, Any]:
        """Return SGLang's `sampling_params`, where a top_k of -1 is all tokens."""
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k or -1,
            "max_new_tokens": max_new_tokens,
            "stop_token_ids": sorted(stop_ids),  # the server knows those of generation_config.json alone
        }


@dataclass(frozen=True, kw_only=True)
class AnswerSettings(TokenSampling):
    """Sampling and length of the target's answers."""

    max_new_tokens: NewTokens
    seed: Seed


@dataclass(frozen=True, kw_only=True)
class Decoding(AnswerSettings, Drafting):
    """The target's answers, and the head's drafts."""


@dataclass(frozen=True, kw_only=True)
class CompareSettings(Settings):
    """The ways of decoding in which heads are compared."""

    shapes: Annotated[list[DraftShape], Field(min_length=1)]
    draft_window: DraftWindow | None
    samplings: Annotated[list[TokenSampling], Field(min_length=1)]
    batch_size: Count
    batch_tokens: Count
    positions: list[Count] | None

    def __post_init__(self) -> None:
        positions = self.positions or []
        if positions != sorted(set(positions)):
            raise InputError(f"compare.positions={positions} must rise, e.g. [1024,4096]")

    def drafts(self) -> list[Shape]:
        """Return the shapes, each once."""
        return [*dict.fromkeys(each.shape for each in self.shapes)]

    @property
    def most_steps(self) -> int:
        return max(shape.steps for shape in self.drafts())


# --- the keys of each action ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Common(Settings):
    """Keys of every action."""

    action: Text
    progress: bool
    run_dir: Text
    target: TargetSettings


@dataclass(frozen=True, kw_only=True)
class OnPrompts(Settings):
    """Prompts as the target reads them."""

    chat: ChatSettings
    prompts: PromptFile
    limit: Count | None
    max_new_tokens: NewTokens


@dataclass(frozen=True, kw_only=True)
class DecodeRun(Common, OnPrompts, Decoding):
    """Decoding in PyTorch."""

    head: Text


@dataclass(frozen=True, kw_only=True)
class CheckRun(DecodeRun):
    """Checks of an exported head."""

    findings: Text | None
    check: CheckSettings


@dataclass(frozen=True, kw_only=True)
class ExportRun(CheckRun):
    """An export, which is checked."""

    run: Text | None
    checkpoint: Text | None


@dataclass(frozen=True, kw_only=True)
class ShowRun(DecodeRun):
    """A page that shows the drafts."""

    out: Text


@dataclass(frozen=True, kw_only=True)
class CompareRun(Common, OnPrompts):
    """A comparison of heads."""

    prompts: GivenPrompts
    heads: Annotated[list[Text], Field(min_length=1)] | None
    sweep: Text | None
    logger: dict[Text, Part]
    seed: Seed
    compare: CompareSettings


@dataclass(frozen=True, kw_only=True)
class LaunchRun(Common, Drafting):
    """A server with a head, or the plain target's."""

    launch: LaunchSettings
    head: Text | None
    dry_run: bool


@dataclass(frozen=True, kw_only=True)
class BenchRun(LaunchRun, OnPrompts, TokenSampling):
    """Measured loads of servers."""

    bench: BenchSettings


@dataclass(frozen=True, kw_only=True)
class TuneRun(Common, OnPrompts, AnswerSettings):
    """A search for the fastest drafts."""

    launch: LaunchSettings
    prompts: GivenPrompts
    head: Text
    tune: TuneSettings


@dataclass(frozen=True, kw_only=True)
class Licenses(Settings):
    """Licences of a head and of its target, with files of their texts."""

    head: Text
    head_file: Text
    target: Text
    target_file: Text


@dataclass(frozen=True, kw_only=True)
class PublishRun(Common):
    """A folder to publish."""

    head: Text
    out: Text
    results: Annotated[list[Text], Field(min_length=1)]
    licenses: Licenses
    base_model: Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$")] | None
    commands_file: Text | None
    notes_file: Text | None


ACTIONS: dict[str, Any] = {
    "export": ExportRun,
    "check": CheckRun,
    "decode": DecodeRun,
    "show": ShowRun,
    "compare": CompareRun,
    "launch": LaunchRun,
    "bench": BenchRun,
    "tune": TuneRun,
    "publish": PublishRun,
}
