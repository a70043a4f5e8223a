"""Every option of every config group composes, and what train.py builds from it can be built."""

import inspect
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from pydoc import locate
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from omegaconf import OmegaConf
from scripts import composed
from stores import CONF, random_samples, write_store

from eagle3.commands.train import build_callbacks, build_loggers, build_trainer, build_training
from eagle3.compose import compose_run
from eagle3.settings.training import TrainRun
from eagle3.target.model import load_target
from eagle3.training.callbacks import RunProgress
from eagle3.training.loggers import EXTRAS

ROOTS = {
    "train": [
        "model", "data", "loss_mask", "loss", "kernels", "optim", "trainer", "callbacks", "logger", "hparams_search",
        "experiment", "log",
    ],
    "precompute": [
        "target", "prompts", "chat", "sampling", "answers", "features", "estimate", "launch", "workers", "log",
    ],
    "serve": ["action", "log"],
}  # fmt: skip
GLOBAL = ("experiment", "hparams_search", "log", "action")  # whose keys are those of the whole config


def test_no_config_group_is_left_out_of_these_tests():
    groups = {path.name for path in CONF.iterdir() if path.is_dir()} - {"hydra"}
    assert groups == {group for used in ROOTS.values() for group in used} | {"serve"}  # parts of several actions


@pytest.mark.parametrize("root", ROOTS)
def test_every_option_composes(root):
    """Those with keys of the whole config one by one, the others together."""
    options = installed_options(root)
    alone = [[f"{group}={option}"] for group in GLOBAL for option in options.pop(group, ())]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        for overrides in alone + an_option_of_each(options):
            config = compose(root, overrides)
            assert all(config[group] for group in options), overrides


def installed_options(root: str) -> dict[str, list[str]]:
    return {
        group: [path.stem for path in sorted((CONF / group).glob("*.yaml")) if is_installed(group, path.stem)]
        for group in ROOTS[root]
    }


def an_option_of_each(options: dict[str, list[str]]) -> list[list[str]]:
    """Return lists of overrides in which each option is once or more."""
    most = max(map(len, options.values()), default=0)
    return [[f"{group}={those[place % len(those)]}" for group, those in options.items()] for place in range(most)]


def is_installed(group: str, option: str) -> bool:
    """Whether the library is there that an option is for."""
    if group == "logger" and option in EXTRAS:
        return find_spec(option) is not None
    return group != "hparams_search" or find_spec(f"hydra_plugins.hydra_{option}_sweeper") is not None


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For every option of a training: teachers everywhere, and the ids of reasoning. Tests only read it."""
    folder, samples = tmp_path_factory.mktemp("store"), random_samples(40, stored="all")
    return write_store(folder / "features", samples, teachers="all", reasoning_ids=[[1], [2]])


def test_every_part_of_a_training_can_be_built(store, tmp_path):
    """tests/features/test_live.py builds data=live."""
    options = {group: those for group, those in installed_options("train").items() if group not in GLOBAL}
    built = an_option_of_each(options | {"data": ["packed"], "trainer": ["cpu", "auto"]})
    for overrides in (*built, ["experiment=quickstart"], ["experiment=target_8b"]):
        overrides += [f"data.path={store}", f"run_dir={tmp_path}/run"]
        overrides += ["model.draft_vocab_size=null"]  # the store's answers hold 50 tokens
        if "logger=wandb" in overrides:
            overrides += ["logger.wandb.name=test"]
        if "loss=function" in overrides:
            overrides += ["loss.divergence.function=divergences.reverse_kl"]
        run: TrainRun = compose_run("train", *overrides)
        _, module = build_training(run)
        assert module.ttt_steps == run.ttt_steps
        assert all(logger is not None for logger in build_loggers(run, 0))
        assert build_trainer(run, [], build_callbacks(run)) is not None


def test_without_our_progress_bar_there_is_none(tmp_path):
    runs = (compose_run("train", f"run_dir={tmp_path}", *without) for without in ([], ["callbacks.progress=null"]))
    ours, none = (build_trainer(run, [], build_callbacks(run)).progress_bar_callback for run in runs)
    assert type(ours) is RunProgress and none is None


def test_training_says_which_share_of_the_answers_a_head_can_draft(store, tmp_path, caplog):
    run = compose_run("train", f"data.path={store}", "model.draft_vocab_size=20", f"run_dir={tmp_path}/run")
    with caplog.at_level("INFO"):
        data, module = build_training(run)
    counts = data.source.answer_counts
    share = 100 * counts.topk(20).values.sum() / counts.sum()
    assert f"draft vocabulary: 20 tokens, {share:.2f} % of the answers" in caplog.text
    assert module.head.config.draft_vocab_size == 20 and share < 100


def test_our_classes_have_no_defaults_for_the_keys_of_conf():
    """Those that they inherit from Lightning cannot be taken away."""
    for root, *more in (["train"], ["train", "optim=muon"], ["precompute"], ["precompute", "answers=sglang"]):
        for part in find_parts(OmegaConf.to_container(composed(root, *more), resolve=False)):
            parameters = inspect.signature(locate(part["_target_"])).parameters  # type: ignore[arg-type]
            given = {key for key in part if key in parameters}
            own = {key for key in given if parameters[key].default is not inspect.Parameter.empty}
            assert part["_target_"].startswith("lightning.") or own <= OF_LIGHTNING, part["_target_"]


OF_LIGHTNING = {*inspect.signature(ModelCheckpoint).parameters, *inspect.signature(EarlyStopping).parameters}


def find_parts(values: Any) -> Iterator[dict[str, Any]]:
    if isinstance(values, dict):
        if "_target_" in values:
            yield values
        for value in values.values():
            yield from find_parts(value)


def test_defaults_of_load_target_are_those_of_conf():
    """A target is loaded in a notebook without all of its keys."""
    parameters = inspect.signature(load_target).parameters
    for key, value in OmegaConf.to_container(composed("precompute").target).items():  # type: ignore[union-attr]
        assert parameters[str(key)].default in (value, inspect.Parameter.empty), key
