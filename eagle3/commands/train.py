"""Runs train.py: builds data, head and trainer, trains, and reports the score."""

import logging
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import (
    Callback,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    ProgressBar,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import OmegaConf

from eagle3 import interrupts
from eagle3.adapters.hydra import in_sweep
from eagle3.adapters.lightning import is_no_validation, is_too_small_share, require_lightning
from eagle3.adapters.quiet import quiet_libraries
from eagle3.cli import exit_with, failed_score
from eagle3.commands import live
from eagle3.commands.devices import require_launched, trains_on_gpu, trains_on_several
from eagle3.data.datamodule import FeatureData
from eagle3.data.mix import SampleFilter
from eagle3.errors import InputError, first_line, require_packages
from eagle3.features.concat import open_recorded, open_source
from eagle3.features.loss_mask import AllTurns
from eagle3.features.source import FeatureSource
from eagle3.head.build import StartHead
from eagle3.head.head import Head
from eagle3.head.loss import UnrollLoss
from eagle3.head.registry import kind_named
from eagle3.head_files.init_from import read_start
from eagle3.head_files.record import Origin
from eagle3.home import pasted
from eagle3.hydra_run import CONF, in_own_process, launched_ranks, output_dir
from eagle3.progress import duration
from eagle3.provenance import git_revision, provenance
from eagle3.settings.nearest import did_you_mean
from eagle3.settings.parts import plain
from eagle3.settings.training import DataSettings, TrainRun
from eagle3.storage.lock import hold
from eagle3.storage.records import read_sealed_json, write_sealed_json
from eagle3.training.callbacks import SameOnAllRanks
from eagle3.training.loggers import EXTRAS, close, log_lineage, log_settings
from eagle3.training.module import HeadTraining
from eagle3.training.optim import AdamWCosine
from eagle3.training.resume import (
    RunCheckpoints,
    decisive_settings,
    differing_settings,
    read_resumed,
    require_checkpoint_fits,
    require_epochs,
    settings_of_result,
)

log = logging.getLogger(__name__)
# Callbacks of Lightning with which the learning rate would not follow its schedule to the end.
UNFIT: dict[type[Callback], str] = {
    GradientAccumulationScheduler: (
        "changes the number of steps, and the learning rate's schedule would not end with the training; set "
        "trainer.accumulate_grad_batches"
    ),
    LearningRateFinder: "sets one rate, and the learning rate follows a schedule; compare some: -m optim.lr=1e-3,3e-3",
    StochasticWeightAveraging: (
        "replaces the learning rate's schedule, and its averages are never validated; use "
        "lightning.pytorch.callbacks.EMAWeightAveraging"
    ),
}


def train(run: TrainRun) -> float:
    """Train, or resume, in this run's folder; return what a sweep maximises."""
    quiet_libraries()
    if rank_zero_only.rank:  # type: ignore[attr-defined]
        logging.disable(logging.INFO if run.live else logging.WARNING)  # alike on all ranks, but for refusals
    if in_sweep() and launched_ranks() not in (None, (1, 1)) and "SUBMITIT_EXECUTOR" not in os.environ:
        exit_with(  # in submitit's jobs, the ranks are those that the sweep has asked for
            "a sweep (-m) starts the ranks of its jobs itself, and torchrun or srun has started it several times; "
            "start it once, e.g. with srun --ntasks=1",
            1,
        )
    if in_sweep() and run.ckpt_path == "auto" and (result := read_result()) is not None:
        require_same_job(result, run)
        return result["score"]  # of a finished job: the sweep is continued
    if in_sweep() and (isinstance(run.trainer.keys["strategy"], dict) or trains_on_several(run.trainer.keys)):
        return run_job_with_ranks(run)
    return train_in(output_dir(), run)


def train_in(folder: Path, run: TrainRun, *watching: Callback) -> float:
    """Train, or resume, in the folder of a run, to which no other process may write meanwhile, and leave result.json
    there. `watching` are callbacks besides those of the run."""
    checkpoints = RunCheckpoints(folder, run.checkpoint_copies)
    alone = hold(folder) if rank_zero_only.rank == 0 else nullcontext()  # type: ignore[attr-defined]
    with alone, closing(checkpoints), ExitStack() as held:
        return train_alone(run, checkpoints, watching, held)


def train_alone(run: TrainRun, checkpoints: RunCheckpoints, watching: Sequence[Callback], held: ExitStack) -> float:
    started = time.monotonic()
    run = replace(run, ckpt_path=checkpoints.resume_from(run.ckpt_path))
    if run.live:
        run = live.with_choices(run)
    require_launched(run.trainer.keys)
    lightning.seed_everything(run.seed, verbose=False)
    torch.set_float32_matmul_precision(run.matmul_precision)
    callbacks = [*build_callbacks(run), *watching]  # a class of the user's own may refuse its keys
    resumed = read_resumed(run.ckpt_path)
    data, module = build_training(run, resumed.record.origin if resumed else None, held)
    if resumed:
        require_checkpoint_fits(resumed, data.source, module.head, module.settings)
        require_epochs(resumed, run.trainer.keys["max_epochs"])
    resume_step = resumed.global_step if resumed else None
    claimed = checkpoints.claim()
    loggers = build_loggers(run, resume_step or 0)
    trainer = build_trainer(run, loggers, [SameOnAllRanks(of_all_ranks(run, data.source, resume_step)), *callbacks])
    trainer.strategy.checkpoint_io.claimed = claimed  # type: ignore[attr-defined]
    (checkpoints.run_dir / "result.json").unlink(missing_ok=True)  # of the part that is resumed
    if resumed and not isinstance(trainer.strategy, ModelParallelStrategy):  # which takes the file apart itself
        trainer.strategy.checkpoint_io.read_already = resumed.content  # type: ignore[attr-defined]
    del resumed  # its memory is Lightning's to free
    log_settings(loggers, plain(run), data.source.describe(), provenance())
    if (launched_ranks() or trainer.num_nodes > 1) and not (run.live or run.checkpoint_copies):
        interrupts.end_by_default()
    try:
        fit(trainer, module, data, ckpt_path=run.ckpt_path, weights_only=True)
        log_lineage(loggers, trainer.checkpoint_callback, data.source)
        if profile := trainer.profiler.summary():  # type: ignore[attr-defined]
            log.info("%s", profile)  # Lightning's own line is silenced with its hints
    except SystemExit:
        raise KeyboardInterrupt from None  # which Lightning hides, before the first step
    finally:
        close(loggers, "success" if trainer.state.finished else "aborted")
    if trainer.global_step == resume_step:
        bounds = "trainer.max_epochs, max_steps, max_time or callbacks.early_stopping"
        log.warning("ckpt_path=%s already has all steps of %s: nothing was trained", run.ckpt_path, bounds)
    score = report(trainer, checkpoints.run_dir, made_with(run, None if run.live else data.source))
    if not (in_sweep() or trainer.fast_dev_run):  # type: ignore[attr-defined]
        following = f"python serve.py action=export run={pasted(checkpoints.run_dir)} head=HEAD"
        log.info("%s: %s; next: %s", checkpoints.run_dir, duration(time.monotonic() - started), following)
    return score


def run_job_with_ranks(run: TrainRun) -> float:
    if in_own_process() != 0 or (result := read_result()) is None:
        return failed_score(run.best_mode)
    return result["score"]


def read_result() -> dict[str, Any] | None:
    """Return the result of this run's folder; None before there is one."""
    result = output_dir() / "result.json"
    return read_sealed_json(result, made_by="the job") if result.is_file() else None


def made_with(run: TrainRun, source: FeatureSource | None) -> dict[str, Any]:
    """Return what a result depends on; features made while training are none of it."""
    return {"settings": settings_of_result(plain(run)), "features": source.fingerprint if source else None}


def of_all_ranks(run: TrainRun, source: FeatureSource, resume_step: int | None) -> dict[str, Any]:
    """Return what must be the same on every rank: with other packs or steps they would wait for one another."""
    return settings_of_result(plain(run)) | {
        "trainer.log_every_n_steps": run.trainer.keys["log_every_n_steps"],
        "the step that ckpt_path resumes": resume_step,
        "the features of data.path": source.fingerprint,
        "the commit": git_revision(),
        "the version of torch": torch.__version__,
    }


def require_same_job(result: dict[str, Any], run: TrainRun) -> None:
    """End a sweep that is continued with other settings or features than a finished job had: its other jobs would be
    compared with that one. The overrides are the same, but the files that they name may have changed."""
    now = made_with(run, None if run.live else open_features(run.data.read(DataSettings), None))
    if (then := result.get("made_with")) is None:
        exit_with(f"{output_dir()}/result.json is of an earlier version; delete it, or give another hydra.sweep.dir", 1)
    differing = differing_settings(then["settings"], now["settings"])
    if then["features"] != now["features"]:
        differing.append("other features in data.path")
    if differing:
        exit_with(
            f"{output_dir()} was finished with other settings ({', '.join(differing)}), and the jobs of a sweep are "
            f"compared: give the settings and features of then, or another hydra.sweep.dir",
            1,
        )


def build_training(
    run: TrainRun, resumed: Origin | None = None, held: ExitStack | None = None
) -> tuple[FeatureData, HeadTraining]:
    """Build what is trained on and what is trained; `resumed` is what a resumed training began with, and `held` ends
    what makes features while training."""
    # First: classes of the user's own refuse their keys before a store is read.
    loss, optim = run.loss.build_kind("loss", UnrollLoss), run.optim.build_kind("optim", AdamWCosine)
    loss_mask = run.loss_mask.build_kind("loss_mask", AllTurns)
    if run.live:
        assert held is not None
        source: FeatureSource = live.open_live(run, resumed, held)
    else:
        source = open_features(run.data.read(DataSettings), resumed)
    start = read_start(run.init_from, source) if run.init_from else None
    head = run.model.build(source=source, start=start) if start else run.model.build(source=source)
    kind_named(head.kind).require_steps(head.config, run.ttt_steps, setting="ttt_steps")
    data = build_data(run, source, head, loss_mask)
    data.setup("fit")  # before there is a trainer: what is wrong with the data is found before anything is written
    return data, build_module(run, head, data, start, loss, optim)


def open_features(data: DataSettings, resumed: Origin | None) -> FeatureSource:
    """Open the stores of `data.path`, or make what `data.source` names."""
    if data.source:
        return data.source.build()
    opened = partial(open_recorded, hash=resumed.hash, shards=resumed.shards) if resumed else open_source
    return opened(data.path, cache_dir=data.cache_dir, cache_gb=data.cache_gb)


def build_data(run: TrainRun, source: FeatureSource, head: Head, loss_mask: AllTurns) -> FeatureData:
    rules = run.data.read(SampleFilter)
    return run.data.build(
        leave_out=["path", "source", "cache_dir", "cache_gb", *vars(rules)],
        source=source,
        rules=rules,
        prepare=partial(kind_named(head.kind).prepare, ttt_steps=run.ttt_steps),
        loss_mask=loss_mask,
        seed=run.seed,
    )


def build_module(
    run: TrainRun, head: Head, data: FeatureData, start: StartHead | None, loss: UnrollLoss, optim: AdamWCosine
) -> HeadTraining:
    embedding, lm_head = data.source.target_weights()
    counts = data.source.answer_counts
    settings = decisive_settings(plain(run)) | {"model.train_lm_head": head.lm_head.weight.requires_grad}
    log.info(
        "head of %.2f M parameters; draft vocabulary: %d tokens, %.2f %% of the answers; %d samples to train, "
        "%d to validate",
        sum(parameter.numel() for parameter in head.parameters()) / 1e6,
        head.config.draft_vocab_size,
        100 * counts[head.draft_ids].sum() / counts.sum(),
        len(data.train_samples),
        len(data.val_samples),
    )
    return HeadTraining(
        head=head,
        loss=loss,
        optim=optim,
        ttt_steps=run.ttt_steps,
        kernels=run.kernels.build(),
        embedding=embedding,
        lm_head=lm_head,
        logit_transform=data.source.target_config.logit_transform,
        origin=Origin.of(data.source, data.train_samples, data.val_fraction),
        settings=settings | ({"init_from": start.files} if start else {}),
    )


def build_loggers(run: TrainRun, resume_step: int) -> list[Logger]:
    for name in run.logger:
        if name in EXTRAS:
            require_packages(name, extra=name, needed_by=f"logger={name}")
    # Lines of later steps are those of a part that is trained again: metrics.csv leaves them out.
    of_csv = {"resume_step": resume_step, "copies": run.checkpoint_copies}
    given: dict[str, dict[str, Any]] = {"csv": of_csv}
    base: Any = Logger  # abstract
    return [part.build_kind(f"logger.{name}", base, **given.get(name, {})) for name, part in run.logger.items()]


def build_callbacks(run: TrainRun) -> list[Callback]:
    callbacks = [part.build_kind(f"callbacks.{name}", Callback) for name, part in run.chosen_callbacks.items()]
    for key, each in zip(run.chosen_callbacks, callbacks, strict=True):
        if rule := next((rule for kind, rule in UNFIT.items() if isinstance(each, kind)), None):
            raise InputError(f"callbacks.{key}._target_={run.chosen_callbacks[key].target} {rule}")
        for name in vars(type(each)):
            if name.startswith("on_") and not hasattr(Callback, name):
                nearest = did_you_mean(name, dir(Callback))
                log.warning("callback %s: Lightning never calls %s%s", type(each).__name__, name, nearest)
    bars = [key for key, each in zip(run.chosen_callbacks, callbacks, strict=True) if isinstance(each, ProgressBar)]
    if len(bars) > 1:
        first, second = bars[:2]
        raise InputError(f"callbacks.{second} is a second progress bar; leave it out, or set callbacks.{first}=null")
    return callbacks


def build_trainer(run: TrainRun, loggers: list[Logger], callbacks: list[Callback]) -> lightning.Trainer:
    part, settings = run.trainer, run.trainer.keys
    if settings["strategy"] == "auto" and trains_on_several(settings):
        ddp: Any = OmegaConf.to_container(OmegaConf.load(Path(CONF) / "trainer" / "ddp.yaml"))
        part = part.with_keys(strategy=ddp["strategy"])
    # With callbacks.progress=null Lightning would add its own bar, for which the host waits for the GPU in every step.
    bar = settings["enable_progress_bar"] and any(isinstance(each, ProgressBar) for each in callbacks)
    name = settings["strategy"]
    if isinstance(name, str) and any(each in name for each in ("spawn", "fork", "notebook")):
        raise InputError(
            f"trainer.strategy={name} trains in copies of this process, which never sees the result; give "
            f"trainer.strategy=ddp"
        )
    try:
        part = part.with_keys(precision=chosen_precision(settings), enable_progress_bar=bar)
        trainer = part.build(callbacks=callbacks, logger=loggers)
    except (MisconfigurationException, ValueError, TypeError) as error:
        raise InputError(f"trainer.* does not fit this machine or Lightning: {error}") from error
    require_lightning(trainer)
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if trainer.num_nodes > 1 and isinstance(environment, LightningEnvironment) and "NODE_RANK" not in os.environ:
        raise InputError(
            f"trainer.num_nodes={trainer.num_nodes}, but no launcher has started this rank, and nothing tells which "
            f"machine this is; start the ranks with srun or torchrun, or set NODE_RANK, MASTER_ADDR and MASTER_PORT"
        )
    return trainer


def chosen_precision(trainer: dict[str, Any]) -> str:
    """Return Lightning's name; auto is bf16, which the fast kernels need, where there is a GPU to train on."""
    if trainer["precision"] == "auto":
        return "bf16-mixed" if trains_on_gpu(trainer) else "32-true"
    return trainer["precision"]


def fit(trainer: lightning.Trainer, module: HeadTraining, data: FeatureData, **resuming: Any) -> None:
    """Train. Only Lightning knows how long an epoch is, and what callbacks of its own need; its error is one line."""
    try:
        trainer.fit(module, datamodule=data, **resuming)
    except MisconfigurationException as error:
        rule = "leaves no batch" if is_too_small_share(error) else "or a callback does not fit this training"
        raise InputError(f"trainer.* {rule}: {first_line(error)}") from error
    except ValueError as error:
        if not is_no_validation(error):
            raise
        every, packs = trainer.val_check_interval, trainer.num_training_batches
        raise InputError(
            f"trainer.val_check_interval={every} is more than the {packs} packs of a rank in an epoch; "
            f"give {packs} or less, or a share, e.g. trainer.val_check_interval=1.0"
        ) from None


def report(trainer: lightning.Trainer, folder: Path, conditions: dict[str, Any]) -> float:
    """Write result.json, which a sweep's table is made of, and return the score that a sweep goes by."""
    best = trainer.checkpoint_callback
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        log.warning("trainer.fast_dev_run=true: no checkpoint, no result.json")
        return 0.0
    if not isinstance(best, ModelCheckpoint):
        log.warning("callbacks.best is left out: no checkpoint but last.ckpt, no result.json")
        return 0.0
    if best.best_model_score is None:
        raise InputError(
            f"training ended at step {trainer.global_step}, before the first validation: no best checkpoint, only "
            f"last.ckpt; train longer (trainer.max_epochs, max_steps, max_time) or set trainer.val_check_interval lower"
        )
    score = float(best.best_model_score)
    result = {
        "metric": best.monitor,
        "mode": best.mode,
        "score": score,
        "checkpoint": best.best_model_path,
        "steps": trainer.global_step,
        "epochs": trainer.current_epoch,
        "made_with": conditions,
    }
    if trainer.is_global_zero:
        write_sealed_json(folder / "result.json", result)
        log.info("best %s %.3f: %s", best.monitor, score, best.best_model_path)
    return score
