"""Keys of conf/serve.yaml and its groups."""

from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, Field, with_config
from typing_extensions import TypedDict

from eagle3.settings.engine import Address, DraftTokens, Launch, Seconds, Steps, TopK
from eagle3.settings.precomputing import Chat, Target
from eagle3.settings.types import STRICT, Count, CountOrZero, NotNegative, Part, Seed, Text, fault

ACTIONS = ("export", "check", "decode", "show", "compare", "launch", "bench", "tune")

Concurrency = Annotated[int, Field(ge=1, le=100_000)]
Temperature = Annotated[float, Field(ge=0, le=100)]
Repeats = Annotated[int, Field(ge=1, le=10_000)]
RepeatsOrNone = Annotated[int, Field(ge=0, le=10_000)]


class Prompts(TypedDict):
    path: Text | None
    split: Text | None


class Limits(TypedDict):
    export: Count | None
    check: Count | None
    decode: Count | None
    show: Count | None
    compare: Count | None
    launch: Count | None
    bench: Count | None
    tune: Count | None


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


@with_config(STRICT)
class Serve(TypedDict):
    target: Target
    chat: Chat
    launch: Launch
    bench: Bench
    tune: Annotated[Tune, AfterValidator(_timed)]
    compare: Compare
    logger: NotRequired[dict[Text, Part]]
    dry_run: bool
    action: Literal["export", "check", "decode", "show", "compare", "launch", "bench", "tune"]
    head: Text | None
    heads: Annotated[list[Text], Field(min_length=1)] | None
    run: Text | None
    checkpoint: Text | None
    format: Literal["sglang", "speculators"]
    findings: Text | None
    out: Text
    steps: Steps
    topk: TopK
    draft_tokens: DraftTokens | None
    adaptive: Text | None
    # The first token comes from prefill: without a second one no draft is ever verified.
    max_new_tokens: Annotated[int, Field(ge=2, le=2**24)]
    temperature: Temperature
    seed: Seed
    prompts: Prompts
    limits: Limits
    limit: Count | None
    check: Check
    progress: bool
    run_dir: Text
