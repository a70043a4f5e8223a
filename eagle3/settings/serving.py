"""Keys of serve.py: a schema for each action, which conf/action names."""

from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, Field, with_config
from typing_extensions import TypedDict

from eagle3.settings.engine import Address, DraftTokens, Launch, Seconds, Steps, TopK
from eagle3.settings.precomputing import Chat, Target
from eagle3.settings.types import STRICT, Count, CountOrZero, NotNegative, Part, Seed, Text, fault

Concurrency = Annotated[int, Field(ge=1, le=100_000)]
Temperature = Annotated[float, Field(ge=0, le=100)]
Repeats = Annotated[int, Field(ge=1, le=10_000)]
RepeatsOrNone = Annotated[int, Field(ge=0, le=10_000)]


class Prompts(TypedDict):
    path: Text | None
    split: Text | None


class Check(TypedDict):
    min_accept_length: Annotated[float, Field(ge=0, le=65)]
    max_difference: NotNegative
    questions: Annotated[list[Text], Field(min_length=1)]


def _sampling(sampling: dict[str, Any]) -> dict[str, Any]:
    if sampling.get("ignore_eos"):
        raise fault(
            "ignore_eos", value=sampling["ignore_eos"],
            rule="would measure what a target says behind its end of turn, which nobody reads and no head was trained "
            "on; leave it out",
        )  # fmt: skip
    return sampling


class Bench(TypedDict):
    prompts: Annotated[dict[Text, Text], Field(min_length=1)] | None
    concurrency: Annotated[list[Concurrency], Field(min_length=1)]
    requests_per_place: RepeatsOrNone
    repeats: Repeats
    warmup: RepeatsOrNone
    sampling: Annotated[dict[Text, Any], AfterValidator(_sampling)] | None
    timeout_s: Seconds
    plain_url: Address | None
    head_url: Address | None
    adaptive_url: Address | None


class Assumed(TypedDict):
    compute_bound_tokens: NotNegative
    step: NotNegative


class Tune(TypedDict):
    concurrency: Concurrency
    loads: Annotated[list[Concurrency], Field(min_length=1)] | None
    steps: Annotated[list[Steps], Field(min_length=1)]
    topk: Annotated[list[TopK], Field(min_length=1)]
    draft_tokens: list[DraftTokens]
    evidence: Literal["decoder", "server"]
    batch_size: Count
    timed: CountOrZero
    requests_per_place: RepeatsOrNone
    warmup: RepeatsOrNone
    timeout_s: Seconds
    assumed: Assumed
    rows: Count


class DraftShape(TypedDict):
    steps: Steps
    topk: TopK
    draft_tokens: DraftTokens | None


class Compare(TypedDict):
    shapes: Annotated[list[DraftShape], Field(min_length=1)]
    temperatures: Annotated[list[Temperature], Field(min_length=1)]
    decoder: Literal["batched", "plain"]
    batch_size: Count
    batch_tokens: Count
    positions: list[Count] | None


def _timed(tune: Tune) -> Tune:
    if tune["evidence"] == "server" and tune["timed"] < 1:
        raise fault("timed", value=tune["timed"], rule="must be 1 or more for tune.evidence=server")
    return tune


class Common(TypedDict):
    progress: bool
    run_dir: Text
    target: Target


class Drafting(TypedDict):
    steps: Steps
    topk: TopK
    draft_tokens: DraftTokens | None


class OnPrompts(TypedDict):
    chat: Chat
    prompts: Prompts
    limit: Count | None
    # The first token comes from prefill: without a second one no draft is ever verified.
    max_new_tokens: Annotated[int, Field(ge=2, le=2**24)]


class Decoding(Common, Drafting, OnPrompts):
    head: Text
    temperature: Temperature
    seed: Seed


class Checks(Decoding):
    findings: Text | None
    check: Check


class Servers(Common):
    launch: Launch


@with_config(STRICT)
class ActionExport(Checks):
    action: Literal["export"]
    run: Text | None
    checkpoint: Text | None
    format: Literal["sglang", "speculators"]


@with_config(STRICT)
class ActionCheck(Checks):
    action: Literal["check"]


@with_config(STRICT)
class ActionDecode(Decoding):
    action: Literal["decode"]


@with_config(STRICT)
class ActionShow(Decoding):
    action: Literal["show"]
    out: Text


@with_config(STRICT)
class ActionCompare(Common, OnPrompts):
    action: Literal["compare"]
    heads: Annotated[list[Text], Field(min_length=1)]
    seed: Seed
    compare: Compare


@with_config(STRICT)
class ActionLaunch(Servers, Drafting):
    action: Literal["launch"]
    head: Text | None
    adaptive: Text | None
    dry_run: bool


@with_config(STRICT)
class ActionBench(Servers, Drafting, OnPrompts):
    action: Literal["bench"]
    head: Text | None
    adaptive: Text | None
    dry_run: bool
    temperature: Temperature
    logger: NotRequired[dict[Text, Part]]
    bench: Bench


@with_config(STRICT)
class ActionTune(Servers, OnPrompts):
    action: Literal["tune"]
    head: Text
    temperature: Temperature
    seed: Seed
    tune: Annotated[Tune, AfterValidator(_timed)]


ACTIONS: dict[str, Any] = {
    "export": ActionExport,
    "check": ActionCheck,
    "decode": ActionDecode,
    "show": ActionShow,
    "compare": ActionCompare,
    "launch": ActionLaunch,
    "bench": ActionBench,
    "tune": ActionTune,
}
