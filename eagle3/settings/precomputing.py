"""Keys of conf/precompute.yaml and its groups, and of the groups that serve.yaml shares with it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from typing_extensions import TypedDict

from eagle3.settings.engine import Address, DraftTokens, LaunchSettings, Seconds, Steps, Temperature, TopK
from eagle3.settings.nearest import did_you_mean
from eagle3.settings.parts import Part, register_schema
from eagle3.settings.prompts import PromptSettings
from eagle3.settings.types import (
    Count,
    CountOrZero,
    Date,
    Places,
    Positive,
    PositiveShare,
    Seed,
    Settings,
    Text,
    text_or,
    wrong,
)

STAGES = ("prompts", "answers", "features", "estimate")

Tokens = Annotated[int, Field(ge=1, le=2**24)]
NewTokens = Annotated[int, Field(ge=2, le=2**24)]  # prefill gives the first; drafts are for the others
Marks = Annotated[list[Text], Field(min_length=2, max_length=2)]  # of reasoning: its start, its end


# Of the function that renders a template: as a variable, each would change or break the rendering.
TEMPLATE_PARAMETERS = frozenset((
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "conversations", "documents",
    "max_length", "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors",
    "sanitize_control_tokens", "tokenize", "tokenizer_kwargs", "tools", "truncation",
))  # fmt: skip


def _variables(template_kwargs: dict[str, Any]) -> dict[str, Any]:
    if taken := sorted(TEMPLATE_PARAMETERS.intersection(template_kwargs)):
        raise wrong(f"must hold variables of the chat template: {taken[0]} is set by this project; leave it out")
    return template_kwargs


@dataclass(frozen=True, kw_only=True)
class TargetSettings(Settings):
    """Which model the target is, and how it is loaded here."""

    path: Text | None
    revision: Text | None
    dtype: Literal["auto", "bfloat16", "float16", "float32"]
    device: Text
    attention: Text | None
    trust_remote_code: bool
    check_health: bool


@dataclass(frozen=True, kw_only=True)
class ChatSettings(Settings):
    """How conversations are rendered, and what ends an answer."""

    template: Text | None
    template_kwargs: Annotated[dict[Text, Any], AfterValidator(_variables)]
    stop_tokens: Annotated[Any, text_or(list[Text], Literal["auto"])]
    date: Date
    reasoning_parser: Annotated[Any, text_or(Marks, Literal["auto"])] | None


@dataclass(frozen=True, kw_only=True)
class Sampling(Settings):
    """Sampling of answers, and their longest length."""

    temperature: Temperature
    top_p: PositiveShare
    top_k: CountOrZero  # all
    max_new_tokens: NewTokens


@dataclass(frozen=True, kw_only=True)
class SamplingSettings(Sampling):
    on_length: Literal["keep", "drop"]
    max_prompt_tokens: Tokens | None
    seed: Seed


@register_schema("eagle3.answers.huggingface.HuggingFaceAnswerer")
class HuggingFaceSettings(TypedDict):
    name: Literal["huggingface"]
    batch_size: Count
    batch_tokens: Count
    window: Count


@register_schema("eagle3.answers.served.ServedAnswerer")
@dataclass(frozen=True, kw_only=True)
class ServedSettings(Settings):
    """Requests to servers for answers. A `name` is a key of ENDPOINTS in eagle3/engine/endpoint.py."""

    name: Literal["sglang", "openai", "auto"]
    urls: list[Address]
    served_as: Text | None
    servers: Places | None
    in_flight: Annotated[int, Field(ge=1, le=100_000)]
    timeout_s: Seconds
    attempts: Annotated[int, Field(ge=1, le=1000)]
    give_up_s: Seconds
    head: Text | None
    steps: Steps
    topk: TopK
    draft_tokens: DraftTokens | None


@register_schema("eagle3.answers.imported.ImportedAnswers")
class ImportedSettings(TypedDict):
    name: Literal["imported"]
    finish_reason: Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True)
class CaptureSettings(Settings):
    """Capture of features inside SGLang servers."""

    required: bool
    servers: Places | None
    memory: Text
    memory_gb: Annotated[float, Field(ge=0.001, le=1e6)]
    timeout_s: Seconds
    attempts: Annotated[int, Field(ge=1, le=1000)]
    give_up_s: Seconds


@dataclass(frozen=True, kw_only=True)
class SampleSettings(Settings):
    """Content of a sample of a feature store."""

    dtype: Literal["bfloat16", "float16", "float32", "fp8"]
    max_length: Annotated[int, Field(ge=2, le=2**24)]
    too_long: Literal["truncate", "drop"]
    teachers: Literal["answers", "all"]
    reasoning: Marks | None


@dataclass(frozen=True, kw_only=True)
class StoreSettings(SampleSettings):
    path: Text | None
    capture_layers: Annotated[list[Annotated[int, Field(ge=1, le=10_000)]], Field(min_length=1)] | None
    batch_tokens: Tokens
    engine: CaptureSettings | None
    shard_mb: Annotated[float, Field(ge=0.001, le=1e6)]


@register_schema("eagle3.workers.cluster.OnRay")
class RaySettings(TypedDict):
    address: Text | None
    count: Places | None
    gpus: CountOrZero | None
    cpus: Annotated[float, Field(gt=0, le=10_000)]
    restarts: CountOrZero


Engine = Literal["huggingface", "sglang"]
Parameters = Annotated[float, Field(gt=0, le=1e18)]


@dataclass(frozen=True, kw_only=True)
class Rates(Settings):
    """Tokens/s of one GPU, each measured with a target and a head of so many parameters."""

    target_parameters: Parameters
    head_parameters: Parameters
    answers: dict[Engine, Positive]  # answer tokens, by who answers
    features: dict[Engine, Positive]
    training: dict[Literal["answers", "prompts"], Positive]  # tokens of answers, tokens of prompts


@dataclass(frozen=True, kw_only=True)
class RelativeSpeed(Settings):
    """Speed of a GPU, of that of the measured one."""

    compute: Positive
    bandwidth: Positive


@dataclass(frozen=True, kw_only=True)
class EstimateSettings(Settings):
    """How the estimate counts, and the rates of the GPU that it is for."""

    prompts: Count
    gpu: Text
    epochs: Count
    relative: RelativeSpeed
    rates: Rates


def _stages(value: Any) -> list[str]:
    stages = value if isinstance(value, list) else [value]
    unknown = [str(stage) for stage in stages if stage not in STAGES]
    if unknown or not stages:
        nearest = did_you_mean(unknown[0], STAGES) if unknown else ""
        raise wrong(f"must hold one or more of {', '.join(STAGES)}{nearest}")
    return stages


def _local(path: str) -> str:
    if "://" in path:
        raise wrong(
            "must be a local folder: prompts and answers are written there; to store features in a bucket, set "
            "features.path=s3://BUCKET/FOLDER"
        )
    if "?" in path:
        raise wrong("must be without a question mark, after which DuckDB reads options")
    return path


@dataclass(frozen=True, kw_only=True)
class CaptureRun(Settings):
    """What features are made with, in advance or while training."""

    target: TargetSettings
    features: StoreSettings
    launch: LaunchSettings
    workers: Part


@dataclass(frozen=True, kw_only=True)
class PrecomputeRun(CaptureRun):
    """A checked run of precompute.py."""

    prompts: PromptSettings
    chat: ChatSettings
    sampling: SamplingSettings
    answers: Part
    estimate: EstimateSettings
    stages: Annotated[Any, AfterValidator(_stages)]
    progress: bool
    out_dir: Annotated[Text, AfterValidator(_local)]

    @property
    def folder(self) -> Path:
        return Path(self.out_dir)

    @property
    def answered_by(self) -> str:
        """The name of the option of conf/answers; a part of the user's own has one too."""
        return self.answers.keys["name"]
