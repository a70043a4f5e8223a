"""Keys of conf/train.yaml and its groups."""

import re
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, Field, with_config
from typing_extensions import TypedDict

from eagle3.errors import InputError
from eagle3.settings.engine import LaunchSettings, Steps
from eagle3.settings.parts import PARTS, Part, register_schema
from eagle3.settings.precomputing import CaptureRun, StoreSettings, TargetSettings
from eagle3.settings.types import (
    OPEN,
    Count,
    CountOrZero,
    NotNegative,
    Places,
    Positive,
    PositiveShare,
    Seed,
    Settings,
    Share,
    Text,
    fault,
    only,
    text_or,
    wrong,
)

SERVED_STEPS = (3, 5)  # chains whose accept length validation reports, in addition to that of ttt_steps

BelowOne = Annotated[float, Field(ge=0, lt=1)]


@register_schema("eagle3.training.optim.AdamWCosine", "eagle3.training.optim.MuonCosine")
@dataclass(frozen=True, kw_only=True)
class OptimSettings(Settings):
    lr: Annotated[float, Field(gt=0, le=10)]
    betas: Annotated[list[BelowOne], Field(min_length=2, max_length=2)]
    weight_decay: Annotated[float, Field(ge=0, le=1000)]
    warmup_fraction: Share
    decay_fraction: Share
    final_lr_fraction: Share


@register_schema("eagle3.head.loss.UnrollLoss")
@dataclass(frozen=True, kw_only=True)
class LossSettings(Settings):
    decay: Annotated[float, Field(gt=0, le=10)]
    normalize: Literal["token", "sequence"]
    divergence: Part = field(default=None)  # type: ignore[assignment]


@register_schema("eagle3.head.divergence.CrossEntropyTv")
@dataclass(frozen=True, kw_only=True)
class TvSettings(Settings):
    tv_weight: Share


@register_schema("eagle3.head.divergence.PlainDivergence")
@dataclass(frozen=True, kw_only=True)
class FunctionSettings(Settings):
    function: Text


@register_schema("eagle3.head.kernels.KernelSettings")
@dataclass(frozen=True, kw_only=True)
class KernelSettings(Settings):
    """Implementation of a training step. Only `fp8`, which rounds products, changes what is computed."""

    attention: Literal["auto", "triton", "flash", "torch_flash", "padded"]
    layer: Literal["auto", "fused", "plain"]
    loss: Literal["auto", "chunked", "plain"]
    loss_chunk: Count
    fp8: bool
    cuda_graphs: Annotated[Any, text_or(bool, Literal["auto"])]

    def __post_init__(self) -> None:
        if self.fp8 and "plain" in (self.layer, self.loss):
            raise InputError(
                f"kernels.fp8=true is for kernels.layer=fused and kernels.loss=chunked, or auto, here kernels.layer="
                f"{self.layer} and kernels.loss={self.loss}; kernels.fp8=false multiplies in the trainer's precision"
            )


@with_config(OPEN)
class Rope(TypedDict):
    rope_type: NotRequired[Literal["default", "linear", "llama3", "yarn"]]  # those that SGLang computes
    rope_theta: Positive
    factor: NotRequired[Annotated[float, Field(ge=1, le=1e6)]]


ROPE_NEEDS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}


def _whole_rope(rope: Rope) -> Rope:
    rope_type = rope.get("rope_type", "default")
    for key in ROPE_NEEDS.get(rope_type, ()):
        if not isinstance(rope.get(key), int | float):
            raise fault(key, value=rope.get(key), rule=f"must be a number: rope_type={rope_type} needs it")
    return rope


@register_schema("eagle3.head.build.build_head", config=OPEN)
class Model(TypedDict):
    kind: Text
    num_heads: Annotated[int, Field(ge=1, le=4096)] | None
    num_kv_heads: Annotated[int, Field(ge=1, le=4096)] | None
    head_dim: Annotated[int, Field(ge=2, le=4096)] | None
    intermediate_size: Annotated[int, Field(ge=1, le=2**20)] | None
    rope_parameters: Annotated[Rope, AfterValidator(_whole_rope)] | None
    draft_vocab_size: Count | None
    default_draft_vocab_size: Count
    lm_head_from_target: bool
    train_lm_head: bool
    fc_norm: NotRequired[bool | None]
    norm_before_fc: NotRequired[bool | None]
    norm_output: NotRequired[bool | None]


@dataclass(frozen=True, kw_only=True)
class SampleRules(Settings):
    min_tokens: Count | None
    max_tokens: Count | None
    prompt_fraction: PositiveShare | None
    only_sources: Annotated[list[Text], Field(min_length=1)] | None
    finished_only: bool


@dataclass(frozen=True, kw_only=True)
class PackSettings(Settings):
    """Settings for splitting, packing and reading samples."""

    pack_tokens: Annotated[int, Field(ge=2, le=2**24)]
    val_fraction: Annotated[float, Field(gt=0, lt=1)]
    weights: Annotated[list[Annotated[float, Field(gt=0, le=1000)]], Field(min_length=1)] | None
    limit_samples: Count | None
    prefetch: Count
    readers: Places
    verify: bool


@register_schema("eagle3.data.datamodule.FeatureData")
@dataclass(frozen=True, kw_only=True)
class DataSettings(SampleRules, PackSettings):
    path: Annotated[Any, text_or(Annotated[list[Text], Field(min_length=1)])] | None
    source: Part | None
    cache_dir: Text | None
    cache_gb: Positive


@register_schema("eagle3.features.live.LiveFeatures")
class LiveSettings(TypedDict):
    ahead_gb: Positive
    val_gb: NotNegative


# --- Lightning -------------------------------------------------------------------------------------------------------


def _devices(value: Any) -> Any:
    one = type(value) is int and (value == -1 or 1 <= value <= 1024)
    several = isinstance(value, list) and value and all(type(each) is int and 0 <= each < 1024 for each in value)
    if not (value == "auto" or one or several or (isinstance(value, str) and re.fullmatch(r"\d+(,\d+)*,?", value))):
        raise wrong("must be a number of devices from 1 up, -1 or auto for all, or a list of their indices")
    return value


def _interval(value: Any) -> Any:
    if not ((type(value) is int and value >= 1) or (type(value) is float and 0 < value <= 1)):
        raise wrong("must be a share of an epoch, above 0.0 and at most 1.0, or a whole number of batches from 1 up")
    return value


def _limit(value: Any) -> Any:
    if not ((type(value) is int and value >= 0) or (type(value) is float and 0 <= value <= 1)):
        raise wrong("must be a share, from 0.0 to 1.0, or a whole number of batches")
    return value


def _endless_or_count(value: int) -> int:
    if value != -1 and value < 1:
        raise wrong("must be 1 or more, or -1 for no limit")
    return value


def _duration(value: Any) -> Any:
    units = {"weeks", "days", "hours", "minutes", "seconds"}
    parts = isinstance(value, dict) and value and set(value) <= units
    if parts and all(type(each) in (int, float) and 0 <= each < 1e9 for each in value.values()):
        return value
    if not (isinstance(value, str) and re.fullmatch(r"\d+:\d\d:\d\d:\d\d", value)):
        raise wrong("must be DAYS:HOURS:MINUTES:SECONDS, each of two digits, e.g. '00:12:00:00', or null")
    return value


Limit = Annotated[Any, AfterValidator(_limit)]
EndlessOrCount = Annotated[int, Field(le=2**31 - 1), AfterValidator(_endless_or_count)]


@register_schema("lightning.Trainer", "lightning.pytorch.Trainer")
class Trainer(TypedDict):
    accelerator: Literal["auto", "cpu", "gpu", "cuda", "mps"]
    devices: Annotated[Any, AfterValidator(_devices)]
    num_nodes: Places
    strategy: Annotated[Any, text_or(Part)]
    # With 16-mixed, gradients that the loss makes before Lightning scales it would vanish.
    precision: Literal["auto", "32-true", "bf16-mixed"]
    max_epochs: EndlessOrCount | None
    max_steps: EndlessOrCount
    max_time: Annotated[Any, AfterValidator(_duration)] | None
    accumulate_grad_batches: Annotated[int, Field(ge=1, le=2**20)]
    gradient_clip_val: NotNegative | None
    val_check_interval: Annotated[Any, AfterValidator(_interval)]
    log_every_n_steps: Count
    num_sanity_val_steps: Annotated[int, Field(ge=-1, le=2**31 - 1)]
    enable_model_summary: bool
    enable_progress_bar: bool
    use_distributed_sampler: Annotated[bool, only(False, "the plan of an epoch spreads packs over ranks")]
    reload_dataloaders_every_n_epochs: Annotated[int, only(1, "each epoch has its own plan")]
    plugins: list[Part]
    # What can be added with +trainer.KEY=VALUE. Callbacks and loggers are groups of their own.
    gradient_clip_algorithm: NotRequired[Literal["norm", "value"] | None]
    min_epochs: NotRequired[Count | None]
    min_steps: NotRequired[Count | None]
    check_val_every_n_epoch: NotRequired[Count | None]
    limit_train_batches: NotRequired[Annotated[Limit, AfterValidator(lambda value: value or _none_left())] | None]
    limit_val_batches: NotRequired[Limit | None]
    overfit_batches: NotRequired[Limit]
    deterministic: NotRequired[Literal[True, False, "warn"] | None]
    benchmark: NotRequired[bool | None]
    detect_anomaly: NotRequired[bool]
    inference_mode: NotRequired[bool]
    fast_dev_run: NotRequired[bool]
    profiler: NotRequired[Literal["simple", "advanced"] | None]


def _none_left() -> None:
    raise wrong("leaves no batch to train on; must be above 0")


@register_schema("eagle3.training.checkpoint.AtomicCheckpointIO")
class CheckpointIOSettings(TypedDict):
    copies: Text | None


@register_schema("lightning.pytorch.strategies.DDPStrategy")
class Ddp(TypedDict):
    broadcast_buffers: NotRequired[bool]
    gradient_as_bucket_view: NotRequired[bool]
    find_unused_parameters: NotRequired[bool]
    static_graph: NotRequired[bool]
    bucket_cap_mb: NotRequired[Positive]
    process_group_backend: NotRequired[Literal["nccl", "gloo"] | None]


@register_schema("lightning.pytorch.strategies.ModelParallelStrategy", config=OPEN)
class ModelParallel(TypedDict):
    save_distributed_checkpoint: Annotated[bool, only(False, "later runs and the export read whole tensors")]


# --- callbacks and loggers -------------------------------------------------------------------------------------------


class Monitoring(TypedDict):
    monitor: Text
    mode: Literal["max", "min"]


@register_schema("eagle3.training.callbacks.BestCheckpoint", config=OPEN)
class Best(Monitoring):
    dirpath: Text
    filename: Text
    auto_insert_metric_name: bool
    save_top_k: Annotated[int, Field(ge=1, le=1000)]  # without a best one nothing could be exported or ranked


@register_schema("eagle3.training.callbacks.LastCheckpoint")
class LastSettings(TypedDict):
    dirpath: Text
    every_n_steps: CountOrZero  # 0: at the end, and where a signal stops the run
    min_seconds: NotNegative


@register_schema("eagle3.training.callbacks.EarlyStopping", config=OPEN)
class EarlyStopping(Monitoring):
    strict: bool
    patience: Count


@register_schema("eagle3.training.curves.Curves")
class CurvesSettings(TypedDict):
    run_dir: Text


@register_schema("eagle3.training.callbacks.RunProgress")
class ProgressSettings(TypedDict):
    refresh_seconds: NotNegative
    metrics: list[Text]


@register_schema("eagle3.training.loggers.MetricsCSV")
class CsvSettings(TypedDict):
    run_dir: Text
    flush_every_n_steps: Count


@register_schema("eagle3.training.loggers.WandbRun", config=OPEN)
class Wandb(TypedDict):
    entity: Text | None
    project: Text
    name: Text | None
    group: Text | None
    tags: list[Text] | None
    job_type: Text
    offline: bool | None
    artifacts: bool
    run_dir: Text
    save_dir: Text


@register_schema("lightning.pytorch.loggers.TensorBoardLogger", config=OPEN)
class TensorBoard(TypedDict):
    save_dir: Text
    name: NotRequired[Text]
    version: NotRequired[str]
    default_hp_metric: NotRequired[bool]


# --- all of it -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TrainRun(Settings):
    """A checked run of train.py."""

    model: Part
    data: Part
    loss_mask: Part
    loss: Part
    kernels: Part
    optim: Part
    trainer: Part
    callbacks: dict[Text, Part | None]
    logger: dict[Text, Part]
    ttt_steps: Steps
    seed: Seed
    init_from: Text | None
    ckpt_path: Text | None
    checkpoint_copies: Text | None
    matmul_precision: Literal["highest", "high", "medium"]
    progress: bool
    run_dir: Text
    target: TargetSettings | None = None  # these three with data=live
    features: StoreSettings | None = None
    launch: LaunchSettings | None = None

    def __post_init__(self) -> None:
        """Refuse a metric that is never logged, which Lightning would find out after the first validation, and a mode
        that would keep the worst checkpoint."""
        callbacks, limit = self.chosen_callbacks, self.trainer.keys.get("limit_val_batches")
        if "best" in callbacks and limit == 0:
            rule = "leaves nothing to choose the best checkpoint by; must be above 0"
            raise fault("trainer", "limit_val_batches", value=limit, rule=rule)
        for unit in ("epochs", "steps"):
            least, most = (self.trainer.keys.get(f"{each}_{unit}") for each in ("min", "max"))
            if least is not None and most is not None and 0 <= most < least:
                raise fault("trainer", f"min_{unit}", value=least, rule=f"is above trainer.max_{unit}={most}")
        names = metric_names(self.ttt_steps)
        # Callbacks of the user's own may log metrics of their own.
        all_known = all(each.target in PARTS or each.target.startswith("lightning.") for each in callbacks.values())
        for name, callback in callbacks.items():
            monitor = callback.keys.get("monitor")
            better = "min" if "loss" in str(monitor) else "max"
            mode = callback.keys.get("mode", better)
            if monitor is not None and monitor not in names | {"epoch", "step"} and all_known:
                rule = f"is logged by nothing; take one of {', '.join(sorted(names))}"
                raise fault("callbacks", name, "monitor", value=monitor, rule=rule)
            if monitor in names and mode != better:
                rule = f"looks for the worst {monitor}; set callbacks.{name}.mode={better}"
                raise fault("callbacks", name, "mode", value=mode, rule=rule)
        live = {name: getattr(self, name) is not None for name in ("target", "features", "launch")}
        if len({*live.values()}) > 1:
            given = " and ".join(name for name in live if live[name])
            rule = f"does not fit {given}: data=live needs target, features and launch, training on a store needs none"
            raise fault(next(name for name in live if not live[name]), value=None, rule=rule)
        if self.live and (hosts := self.trainer.keys["num_nodes"]) > 1:
            rule = (
                "must be 1 with data=live: features travel through the memory of one host; for several, store them "
                "first, in the stage features, and train on the store"
            )
            raise fault("trainer", "num_nodes", value=hosts, rule=rule)

    @property
    def live(self) -> CaptureRun | None:
        """How features are made while training; None where they are in a store."""
        if self.target is None or self.features is None or self.launch is None:
            return None
        in_process = Part("eagle3.workers.in_process.InProcess", {})
        return CaptureRun(target=self.target, features=self.features, launch=self.launch, workers=in_process)

    @property
    def best_mode(self) -> str | None:
        """Whether the best score is the max or the min; None without a best checkpoint."""
        best = self.callbacks.get("best")
        return best.keys.get("mode") if best else None

    @property
    def chosen_callbacks(self) -> dict[str, Part]:
        return {name: callback for name, callback in self.callbacks.items() if callback}


def served_steps(ttt_steps: int) -> list[int]:
    """Return the chains whose accept length in a server is simulated at every validation, the longest last."""
    return [*(steps for steps in SERVED_STEPS if steps < ttt_steps), ttt_steps]


def metric_names(ttt_steps: int) -> set[str]:
    """Return what a callback can monitor."""
    both = {"loss", "accept_length", *(f"{name}_{step}" for name in ("loss", "accuracy") for step in range(ttt_steps))}
    served = {f"val/served_accept_length_{steps}" for steps in served_steps(ttt_steps)}
    served |= {f"val/served_reach_{depth}" for depth in range(1, ttt_steps + 1)}
    return {f"{stage}/{name}" for stage in ("train", "val") for name in both} | served
