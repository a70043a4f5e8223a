"""Every key of conf/ takes values of its own type and range; all others end in one line with key, value and rule."""

import math
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import lightning
import pytest
import scripts
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import DDPStrategy
from omegaconf import DictConfig, OmegaConf
from stores import CONF

from eagle3.commands.train import build_callbacks, build_trainer
from eagle3.errors import InputError
from eagle3.head.divergence import CrossEntropyTv
from eagle3.head.loss import UnrollLoss
from eagle3.settings.check import check_settings, checked_run
from eagle3.settings.parts import Part
from eagle3.settings.types import shown
from eagle3.training.callbacks import BestCheckpoint, EarlyStopping
from eagle3.training.optim import MuonCosine

pytestmark = pytest.mark.filterwarnings("ignore:.*GPU available but not used.*", "ignore:.*fraction.*0.*")

MIX = ("prompts/traffic=production", "prompts.traffic.sample=FILE", "prompts.traffic.size=9")
OPTIONS = [
    ("train",),
    ("train", "model=eagle31", "optim=muon", "trainer=ddp", "logger=wandb"),
    ("train", "trainer=fsdp", "trainer.accelerator=cpu"),
    ("train", "data=live", "features=sglang"),
    ("precompute", "out_dir=DIR"),
    ("precompute", "out_dir=DIR", "answers=imported", "prompts/privacy/model=onnx", *MIX),
    ("serve", "action=export"),
    ("serve", "action=compare", "logger=wandb"),
    ("serve", "action=bench"),
    ("serve", "action=tune"),
    ("serve", "action=publish"),
]


def composed(script: str, *overrides: str) -> DictConfig:
    """Compose a config, with what Hydra would know of the run."""
    config = scripts.composed(script, *overrides)
    OmegaConf.set_struct(config, False)
    if script != "precompute":
        config.run_dir = "RUN"
        if config.get("logger") and "wandb" in config.logger:
            config.logger.wandb.name = "job"
    return config


def find_keys(values: Any, place: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = [place] if place else []
    for key, value in values.items() if isinstance(values, dict) else ():
        found += find_keys(value, (*place, key))
    return found


@cache
def whole_configs() -> list[tuple[str, dict[str, Any]]]:
    return [
        (script, OmegaConf.to_container(composed(script, *overrides), resolve=True))  # type: ignore[misc]
        for script, *overrides in OPTIONS
    ]


@cache
def all_keys() -> list[tuple[tuple[str, tuple[str, ...]], dict[str, Any]]]:
    """Each key once, in the first config that has it."""
    whole = reversed(whole_configs())
    return [*{(script, place): values for script, values in whole for place in reversed(find_keys(values))}.items()]


NASTY = [None, True, -1, 10**10, 1e300, math.nan, "", "1", "a\n", [[]]]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
VALUES = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(st.text(max_size=3), SCALARS, max_size=2)

# Whose values are of several types, or anything: what a template, a server or W&B makes of them is theirs to say.
FREE = ("chat.template_kwargs", "launch.env", "launch.extra_flags", "bench.sampling", "model.rope_parameters")
SEVERAL = {
    "trainer.devices", "trainer.strategy", "trainer.val_check_interval", "trainer.max_time", "data.path", "stages",
    "logger.wandb.name", "kernels.cuda_graphs", "chat.reasoning_parser",
}  # fmt: skip
ENDLESS = {"trainer.max_steps", "trainer.max_epochs", "trainer.num_sanity_val_steps"}  # -1


def changed(values: dict[str, Any], place: tuple[str, ...], value: Any) -> dict[str, Any]:
    key, *rest = place
    return {**values, key: changed(values[key], tuple(rest), value) if rest else value}


def value_at(values: Any, place: tuple[str, ...]) -> Any:
    return value_at(values[place[0]], place[1:]) if place else values


def refusal(script: str, values: dict[str, Any]) -> str | None:
    try:
        checked_run(values, script)
    except InputError as error:
        return str(error)
    return None


def is_of_its_type(value: Any, before: Any, key: str) -> bool:
    """Say it by another rule than the schema's: a value stays of the kind that conf/ gives."""
    if key.startswith(FREE) or value is None:
        return True
    if isinstance(value, float) and not math.isfinite(value):
        return False
    if key in SEVERAL:
        return True
    if isinstance(before, bool):
        return isinstance(value, bool)
    if isinstance(before, int | float):
        least, most = -1 if key in ENDLESS else 0, 1e19 if key.endswith("_parameters") else 1e10
        return isinstance(value, int | float) and not isinstance(value, bool) and least <= value < most
    if isinstance(before, str):
        return isinstance(value, str) and value.isprintable() and bool(value.strip())
    return before is None or isinstance(value, type(before))


def assert_taken_or_named(script: str, values: dict[str, Any], place: tuple[str, ...], value: Any) -> None:
    key, line = ".".join(place), refusal(script, changed(values, place, value))
    if line is None:
        assert is_of_its_type(value, value_at(values, place), key), f"{script}: {key}={value!r} is taken"
        return
    assert key in line and "\n" not in line, f"{key}={value!r}: {line}"
    if not isinstance(value, list | dict):
        assert shown(value) in line, line


def test_what_conf_says_is_taken():
    assert [refusal(script, values) for script, values in whole_configs()] == [None] * len(OPTIONS)


def test_every_key_takes_a_nasty_value_or_is_named_in_one_line():
    assert len(all_keys()) > 300
    for (script, place), values in all_keys():
        for value in NASTY:
            assert_taken_or_named(script, values, place, value)


@pytest.mark.parametrize(
    ("script", "override", "line"),
    [
        ("train", "trainer.gradient_clip_val=-1", "trainer.gradient_clip_val=-1 must be 0 or more; the default is"),
        ("train", "callbacks.best.monitor=val/best", "callbacks.best.monitor=val/best is logged by nothing; take one"),
        ("train", "callbacks.best.monitor=val/loss", "best.mode=max looks for the worst val/loss; set callb"),
        ("train", "+trainer.limit_val_batches=0", "limit_val_batches=0 leaves nothing to choose the best che"),
        ("train", "optim._target_=adams.Adam", "names no class or function that can be imported (modules are found"),
        ("train", "+optim.momentum=0.9", "optim.momentum is not a key of this config; --cfg job shows every key"),
        ("train", "+trainer.min_epochs=11", "trainer.min_epochs=11 is above trainer.max_epochs=10"),
        (
            "train",
            "+callbacks.more={_target_:lightning.pytorch.callbacks.ModelCheckpoint,monitor:val/none}",
            "callbacks.more.monitor=val/none is logged by nothing",
        ),
        (
            "train",
            "+callbacks.more={_target_:lightning.pytorch.callbacks.LambdaCallback,on_train_end:team.notes}",
            "callbacks.more.on_train_end=team.notes must be a function; give {_target_: hydra.utils.get_method, path",
        ),
        ("train", "+trainer.limit_val_batches=-2", "trainer.limit_val_batches=-2 must be a share"),
        ("train", "~optim.betas", "optim.betas is left out and must be there; the default is optim.betas=[0.9, 0.95]"),
        ("train", "optim.betas=[0.9,2]", "optim.betas[1]=2 must be below 1; the default is optim.betas[1]=0.95"),
        ("train", "model.rope_parameters={rope_type:yarn,rope_theta:1e4}", "model.rope_parameters.factor=null must be"),
        ("precompute", "prompts.sources=[{path:a,weight:2}]", "prompts.sources[0].weight is not a key of this config"),
        ("precompute", "prompts.path=[a,b]", "several are a list in prompts.sources, e.g. [a.jsonl,b.jsonl]"),
        ("precompute", "target.revision=2024", "target.revision=2024 must be a text; quote what YAML takes for"),
        ("precompute", "prompts.length={min_turns:5,max_turns:2}", "prompts.length.min_turns=5 is above prompts.len"),
        ("train", "kernels.fp8=no", "kernels.fp8='no' must be true or false; the default is kernels.fp8=false"),
        ("precompute", "prompts.privacy.actions.IBAN=hide", "must be 'drop', 'mask' or 'keep'; the default"),
        ("precompute", "chat.reasoning_parser=no_auto", "chat.reasoning_parser=no_auto must be 'auto'"),
        ("serve action=compare", "compare.shapes=[{steps:3,topk:1}]", "compare.shapes[0].draft_tokens"),
        ("serve action=compare", "compare.shapes=[{steps:3,topk:1,draft_tokens:9}]", "set draft_tokens=4 or null"),
        ("serve action=compare", "compare.positions=[2,1]", "compare.positions=[2, 1] must rise"),
        ("serve action=decode", "topk=4", "steps=3 topk=4 draft_tokens=None: such a tree"),
        ("serve action=launch", "launch.env={TOKEN:[s3cret]}", "launch.env.TOKEN=… must be a text or a number"),
        ("serve action=bench", "bench.sampling={ignore_eos:true}", "bench.sampling.ignore_eos=true would measure"),
        ("serve action=bench", "bench.sampling={top_p:0.9}", "bench.sampling.top_p=0.9 has a key of its own"),
    ],
)
def test_a_wrong_setting_is_one_line_with_a_fix(script, override, line):
    script, *options = [*script.split(), "out_dir=DIR"] if script == "precompute" else script.split()
    with pytest.raises(InputError) as refused:
        check_settings(composed(script, *options, override), script)
    assert line in str(refused.value)
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize(
    "override",
    [
        "+trainer.limit_val_batches=2", "+trainer.gradient_clip_algorithm=value", "+trainer.deterministic=warn",
        "+callbacks.rate={_target_:lightning.pytorch.callbacks.LearningRateMonitor,logging_interval:step}",
        "+callbacks.prune={_target_:lightning.pytorch.callbacks.ModelPruning,pruning_fn:l1_unstructured}",
        "+callbacks.more={_target_:lightning.pytorch.callbacks.LambdaCallback,on_train_end:"
        "{_target_:hydra.utils.get_method,path:builtins.print}}",
        "+callbacks.early_stopping.min_delta=0.01", "+logger.wandb.tags=[a]", "trainer.max_time='00:12:00:00'",
        "+logger.tb={_target_:lightning.pytorch.loggers.TensorBoardLogger,save_dir:DIR}",
        "+callbacks.more={_target_:lightning.pytorch.callbacks.ModelCheckpoint,monitor:step,mode:max}",
        "trainer.strategy=ddp", "trainer.devices=[0,1]", "loss._target_=test_settings.AnyLoss",
    ],
)  # fmt: skip
def test_what_a_library_or_a_users_own_part_takes_can_be_added(override):
    check_settings(composed("train", "logger=wandb", override.replace("test_settings", __name__)), "train")


class AnyLoss:
    """A user's own part, which has no schema: its signature says what it takes."""

    def __init__(self, *, decay: float, normalize: str, first: int = None) -> None: ...  # type: ignore[assignment]  # noqa: RUF013


@dataclass(frozen=True, kw_only=True)
class OwnLoss(UnrollLoss):
    first: Any = None
    decay: float = 0.9


class OwnOptim(MuonCosine):
    """Another optimizer, with the keys of ours."""


class OwnTv(CrossEntropyTv):
    """Another divergence."""


class OwnBest(BestCheckpoint):
    """Keeps checkpoints elsewhere, too."""


class OwnStop(EarlyStopping):
    def __init__(self, *, slack: float = 0, **options: Any) -> None:
        super().__init__(**options)


class OwnDdp(DDPStrategy):
    """Lightning has its class in a module other than the one that conf/ names."""


OWN_LOSS, OWN_OPTIM = (
    f"{group}._target_={__name__}.{name}" for group, name in (("loss", "OwnLoss"), ("optim", "OwnOptim"))
)
OWN_CALLBACKS = [f"callbacks.best._target_={__name__}.OwnBest", f"callbacks.early_stopping._target_={__name__}.OwnStop"]
DERIVED: list[tuple[list[str], str, str]] = [
    ([OWN_LOSS], "loss.decay=-1", "loss.decay=-1 must be above 0"),
    ([OWN_LOSS], "+loss.frist=3", "OwnLoss, which takes decay, normalize, divergence, first"),
    ([OWN_OPTIM], "optim.betas=[0.9,2]", "optim.betas[1]=2 must be below 1"),
    (["loss=soft_cross_entropy"], f"+loss.divergence={{_target_:{__name__}.OwnTv,tv_weight:2}}",
     "loss.divergence.tv_weight=2 must be at most 1"),
    (OWN_CALLBACKS, "callbacks.best.save_top_k=0", "callbacks.best.save_top_k=0 must be 1 or more"),
    (OWN_CALLBACKS, "callbacks.best.mode=min", "callbacks.best.mode=min looks for the worst"),
    (["trainer=ddp", f"trainer.strategy._target_={__name__}.OwnDdp"], "trainer.strategy.broadcast_buffers=2",
     "trainer.strategy.broadcast_buffers=2 must be true or false"),
]  # fmt: skip


@pytest.mark.parametrize(("derived", "override", "line"), DERIVED)
def test_a_class_derived_from_one_of_ours_keeps_the_ranges_of_its_keys(derived, override, line):
    check_settings(composed("train", *derived), "train")
    with pytest.raises(InputError) as refused:
        check_settings(composed("train", *derived, override), "train")
    assert line in str(refused.value)


@pytest.mark.parametrize(
    ("override", "line"),
    [("loss.decay=fast", "loss.decay=fast must be a number"), ("loss.normalize=3", "loss.normalize=3 must be a text"),
     ("+loss.first=0.5", "loss.first=0.5 must be a whole number")],
)  # fmt: skip
def test_a_key_of_an_own_class_has_the_plain_type_of_its_signature(override, line):
    own = f"loss._target_={__name__}.AnyLoss"
    check_settings(composed("train", own, "+loss.first=null"), "train")  # null where that is the default
    with pytest.raises(InputError) as refused:
        check_settings(composed("train", own, override), "train")
    assert line in str(refused.value)


class SpeltWrong(Callback):
    def on_validation_ends(self, *_: Any) -> None: ...


def test_a_hook_that_lightning_does_not_know_is_named(caplog):
    build_callbacks(check_settings(composed("train", f"+callbacks.mine={{_target_: {__name__}.SpeltWrong}}"), "train"))
    assert (
        "callback SpeltWrong: Lightning never calls on_validation_ends (did you mean on_validation_end?)" in caplog.text
    )


def test_an_own_part_is_derived_from_the_class_that_its_group_needs():
    part = Part(f"{__name__}.AnyLoss", {"decay": 1.0, "normalize": "token"})
    with pytest.raises(InputError, match=r"AnyLoss must be derived from eagle3\.head\.loss\.UnrollLoss$"):
        part.build_kind("loss", UnrollLoss)


def test_a_library_s_class_that_refuses_its_keys_or_lacks_a_package_is_one_line(monkeypatch):
    monkeypatch.setattr(lightning.pytorch.loggers.mlflow, "_MLFLOW_AVAILABLE", False)
    rate = Part("lightning.pytorch.callbacks.LearningRateMonitor", {"logging_interval": "hour"})
    with pytest.raises(
        InputError, match=r"^callbacks.rate._target_=\S+LearningRateMonitor cannot be built \(logging_int"
    ):
        rate.build_kind("callbacks.rate", Callback)
    with pytest.raises(InputError, match=r"^logger.mine._target_=\S+MLFlowLogger cannot be built"):
        Part("lightning.pytorch.loggers.MLFlowLogger", {}).build_kind("logger.mine", Logger)  # type: ignore[type-abstract]


@pytest.mark.parametrize("override", ["+loss.first=[1,2]", "~loss.normalize", "+callbacks.early_stopping.slack=-9"])
def test_a_derived_class_may_add_keys_and_leave_some_to_its_defaults(override):
    check_settings(composed("train", OWN_LOSS, *OWN_CALLBACKS, override), "train")


PARTS = ("optim", "loss", "kernels", "trainer", "callbacks")


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), VALUES | st.integers(-1, 3) | st.floats(0, 1))
def test_what_is_taken_can_be_built(number, value):
    """Lightning may still say that this machine lacks something, in a line of its own."""
    built = [(place, values) for (script, place), values in all_keys() if script == "train" and place[0] in PARTS]
    place, values = built[number % len(built)]
    values = changed(values, place, value)
    if refusal("train", values) is None:
        run = checked_run(values, "train")
        for part in (run.optim, run.loss, run.kernels):
            part.build()
        try:
            assert build_trainer(run, [], build_callbacks(run)).callbacks
        except InputError as error:
            assert str(error).startswith("trainer."), error


# --- experiments -----------------------------------------------------------------------------------------------------


def with_experiment(tmp_path: Path, content: str) -> DictConfig:
    conf = shutil.copytree(CONF, tmp_path / "conf")
    (conf / "experiment" / "mine.yaml").write_text(content)
    config = scripts.composed("train", "experiment=mine", "loss.decay=0.7", conf=conf)
    config.run_dir = "RUN"
    return config


def test_an_experiment_wins_over_the_primary_config_and_the_command_line_over_both(tmp_path):
    content = "# @package _global_\nseed: 3\nttt_steps: 2\nmatmul_precision: medium\nloss:\n  decay: 0.1\n"
    config = with_experiment(tmp_path, content)
    check_settings(config, "train")
    assert (config.seed, config.ttt_steps, config.matmul_precision, config.loss.decay) == (3, 2, "medium", 0.7)
    assert config.callbacks.best.monitor == "val/served_accept_length_2"


@pytest.mark.parametrize("key", ["callbacks", "logger.csv"])
def test_an_empty_group_that_would_leave_all_as_it_is_is_refused(key):
    with pytest.raises(InputError, match=f"^{key}={{}} changes nothing: Hydra merges it into {key}; leave out"):
        composed("train", f"{key}={{}}")


def test_a_target_that_a_training_on_a_store_would_not_read_is_refused():
    with pytest.raises(InputError, match=r"^features=null does not fit target: data=live needs target, features and"):
        check_settings(composed("train", "data.path=DIR", "+target=llama31_8b"), "train")


def test_an_option_of_a_group_of_ones_own_is_an_unknown_key(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "one.yaml").write_text("key: 1\n")
    for option, key in (("mine=one", "mine"), ("optim@other=adamw", "other")):
        found = (f"hydra.searchpath=[{tmp_path}]", f"+{option}")
        given = scripts.composed("train", *found, return_hydra_config=True)
        config = scripts.as_in_a_run(given, str(tmp_path))
        with pytest.raises(InputError, match=f"^{key} is not a key of this config"):
            check_settings(config, "train")


def test_an_experiment_that_would_do_nothing_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"sets seed, loss below .* the line: # @package _global_"):
        check_settings(with_experiment(tmp_path, "seed: 3\nloss:\n  decay: 0.1\n"), "train")


@pytest.mark.parametrize("url", ["s3://BUCKET/FOLDER", "gs://BUCKET/FOLDER"])
def test_an_out_dir_in_a_bucket_is_refused_and_names_the_key_for_features_in_one(url):
    with pytest.raises(InputError, match=rf"^out_dir={url} must be a local folder: .*set features\.path=s3://BUCKET"):
        check_settings(composed("precompute", f"out_dir={url}"), "precompute")
