"""Runs train.py's valid config: builds data, head and trainer, trains, and reports the score."""

import logging
import time
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf

from eagle3 import cli
from eagle3.adapters.hydra import in_sweep
from eagle3.adapters.lightning import is_no_validation, is_too_small_share, require_lightning
from eagle3.data.datamodule import FeatureData
from eagle3.data.mix import SampleFilter
from eagle3.errors import InputError, require_packages
from eagle3.features.concat import open_source
from eagle3.features.source import FeatureSource
from eagle3.head.build import StartHead
from eagle3.head.draft_head import DraftHead
from eagle3.head.registry import kind_named
from eagle3.head_files.init_from import read_start
from eagle3.progress import duration
from eagle3.storage.lock import hold
from eagle3.storage.records import read_sealed_json, write_sealed_json
from eagle3.training.checkpoint import Origin
from eagle3.training.loggers import EXTRAS, close, log_lineage, log_settings
from eagle3.training.module import HeadTraining
from eagle3.training.resume import (
    RunCheckpoints,
    decisive_settings,
    read_resumed,
    require_checkpoint_fits,
    require_epochs,
)

log = logging.getLogger(__name__)


def train(config: DictConfig) -> float:
    """Train, or resume, in this run's folder; return what a sweep maximises."""
    cli.quiet_libraries()
    if rank_zero_only.rank:  # type: ignore[attr-defined]
        logging.disable(logging.INFO)  # which is the same on every rank
    if in_sweep() and config.ckpt_path == "auto" and (score := score_of_job()) is not None:
        return score  # of a finished job: the sweep is continued
    if in_sweep() and (OmegaConf.is_config(config.trainer.strategy) or trains_on_several(config.trainer)):
        return job_of_ranks(config)
    checkpoints = RunCheckpoints(cli.output_dir(), config.checkpoint_copies)
    alone = hold(cli.output_dir()) if rank_zero_only.rank == 0 else nullcontext()  # type: ignore[attr-defined]
    with alone, closing(checkpoints):
        return train_alone(config, checkpoints)


def train_alone(config: DictConfig, checkpoints: RunCheckpoints) -> float:
    """Train while no other process writes to this run's folder."""
    started, run = time.monotonic(), cli.output_dir()
    config.ckpt_path = checkpoints.resume_from(config.ckpt_path)
    lightning.seed_everything(config.seed, verbose=False)
    torch.set_float32_matmul_precision(config.matmul_precision)
    resumed = read_resumed(config.ckpt_path)
    data, module = build_training(config)
    if resumed:
        require_checkpoint_fits(resumed, data.source, module.head, module.settings)
        require_epochs(resumed, config.trainer.max_epochs)
    resume_step = resumed.global_step if resumed else None
    claimed = checkpoints.claim()
    loggers = build_loggers(config, resume_step or 0)
    trainer = build_trainer(config, loggers)
    trainer.strategy.checkpoint_io.claimed = claimed  # type: ignore[attr-defined]
    (cli.output_dir() / "result.json").unlink(missing_ok=True)  # of the part that is resumed
    if resumed and not isinstance(trainer.strategy, ModelParallelStrategy):  # which takes the file apart itself
        trainer.strategy.checkpoint_io.read_already = resumed.content  # type: ignore[attr-defined]
    del resumed  # its memory is Lightning's to free
    log_settings(loggers, cli.plain(config), data.source.describe(), cli.provenance())
    try:
        fit(trainer, module, data, ckpt_path=config.ckpt_path, weights_only=True)
        log_lineage(loggers, trainer.checkpoint_callback, data.source)
        if profile := trainer.profiler.summary():  # type: ignore[attr-defined]
            log.info("%s", profile)  # Lightning's own line is silenced with its hints
    except SystemExit:
        raise KeyboardInterrupt from None  # which Lightning hides, before the first step
    finally:
        close(loggers, "success" if trainer.state.finished else "aborted")
    if trainer.global_step == resume_step:
        bounds = "trainer.max_epochs, max_steps, max_time or callbacks.early_stopping"
        log.warning("ckpt_path=%s has all steps of %s: none added", config.ckpt_path, bounds)
    score = report(trainer)
    if not (in_sweep() or trainer.fast_dev_run):  # type: ignore[attr-defined]
        following = f"python serve.py action=export run={run} head=HEAD"
        log.info("%s: %s; next: %s", run, duration(time.monotonic() - started), following)
    return score


def job_of_ranks(config: DictConfig) -> float:
    if cli.in_own_process() != 0 or (score := score_of_job()) is None:
        return cli.failed_score(config)
    return score


def score_of_job() -> float | None:
    """Return the score in the result of this run's folder; None before there is one."""
    result = cli.output_dir() / "result.json"
    return read_sealed_json(result, made_by="the job")["score"] if result.is_file() else None


def build_training(config: DictConfig) -> tuple[FeatureData, HeadTraining]:
    """Build what is trained on and what is trained, from a composed train.yaml."""
    source = open_features(config.data)
    start = read_start(config.init_from, source) if config.init_from else None
    head = cli.build(config.model, source=source, start=start) if start else cli.build(config.model, source=source)
    data = build_data(config, source, head)
    data.setup("fit")  # before there is a trainer: what is wrong with the data is found before anything is written
    return data, build_module(config, head, data, start)


def open_features(config: DictConfig) -> FeatureSource:
    """Open the stores of `data.path`, or make what `data.source` names."""
    return (
        cli.build(config.source)
        if config.source
        else open_source(cli.plain(config).get("path"), cache_dir=config.cache_dir, cache_gb=config.cache_gb)
    )


def build_data(config: DictConfig, source: FeatureSource, head: DraftHead) -> FeatureData:
    rules = cli.settings(SampleFilter, config.data)
    return cli.build(
        config.data,
        leave_out=["path", "source", "cache_dir", "cache_gb", *vars(rules)],
        source=source,
        rules=rules,
        prepare=partial(kind_named(head.config.KIND).prepare, ttt_steps=config.ttt_steps),
        loss_mask=cli.build(config.loss_mask),
        seed=config.seed,
    )


def build_module(config: DictConfig, head: DraftHead, data: FeatureData, start: StartHead | None) -> HeadTraining:
    embedding, lm_head = data.source.target_weights()
    counts = data.source.answer_counts
    settings = decisive_settings(cli.plain(config)) | {"model.train_lm_head": head.lm_head.weight.requires_grad}
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
        loss=cli.build(config.loss),
        optim=cli.build(config.optim),
        ttt_steps=config.ttt_steps,
        kernels=cli.build(config.kernels),
        embedding=embedding,
        lm_head=lm_head,
        logit_transform=data.source.target_config.logit_transform,
        origin=Origin.of(data.source, data.train_samples, data.val_fraction),
        settings=settings | ({"init_from": start.files} if start else {}),
    )


def build_loggers(config: DictConfig, resume_step: int) -> list[Logger]:
    for name in config.logger:
        if name in EXTRAS:
            require_packages(name, extra=name, needed_by=f"logger={name}")
    # Lines of later steps are those of a part that is trained again: metrics.csv leaves them out.
    of_csv = {"resume_step": resume_step, "copies": config.checkpoint_copies}
    return [cli.build(logger, **(of_csv if name == "csv" else {})) for name, logger in config.logger.items()]


def build_trainer(config: DictConfig, loggers: list[Logger]) -> lightning.Trainer:
    settings = config.trainer
    precision = chosen_precision(settings.precision, settings.accelerator)
    if settings.strategy == "auto" and trains_on_several(settings):
        settings = OmegaConf.merge(settings, {"strategy": OmegaConf.load(Path(cli.CONF) / "trainer/ddp.yaml").strategy})
    callbacks = [cli.build(callback) for callback in config.callbacks.values() if callback]
    # With callbacks.progress=null Lightning would add its own bar, for which the host waits for the GPU in every step.
    bar = settings.enable_progress_bar and any(isinstance(each, ProgressBar) for each in callbacks)
    try:
        trainer = cli.build(settings, callbacks=callbacks, logger=loggers, precision=precision, enable_progress_bar=bar)
    except (MisconfigurationException, ValueError, TypeError) as error:
        raise InputError(f"trainer.* does not fit this machine or Lightning: {error}") from error
    require_lightning(trainer)
    return trainer


def chosen_precision(precision: str, accelerator: str) -> str:
    """Return Lightning's name; auto is bf16, which the fast kernels need, where there is a GPU to train on."""
    if precision == "auto":
        on_gpu = accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
        return "bf16-mixed" if on_gpu else "32-true"
    return precision


def trains_on_several(trainer: DictConfig) -> bool:
    """Say whether the training has several ranks. Lightning's own choice would send the buffers at every step."""
    if trainer.num_nodes > 1:
        return True
    devices = trainer.devices
    if devices in ("auto", -1):
        return trainer.accelerator in ("auto", "gpu", "cuda") and torch.cuda.device_count() > 1
    if isinstance(devices, str):
        return len(devices.strip(",").split(",")) > 1
    return devices > 1 if isinstance(devices, int) else len(devices) > 1


def fit(trainer: lightning.Trainer, module: HeadTraining, data: FeatureData, **resuming: Any) -> None:
    """Train. Lightning alone knows how long an epoch is when it counts the steps; its error is said with our keys."""
    try:
        trainer.fit(module, datamodule=data, **resuming)
    except MisconfigurationException as error:
        if not is_too_small_share(error):
            raise
        raise InputError(f"trainer.* leaves no batch: {error}") from None
    except ValueError as error:
        if not is_no_validation(error):
            raise
        every, packs = trainer.val_check_interval, trainer.num_training_batches
        raise InputError(
            f"trainer.val_check_interval={every} is more than the {packs} packs of a rank in an epoch; "
            f"give {packs} or less, or a share, e.g. trainer.val_check_interval=1.0"
        ) from None


def report(trainer: lightning.Trainer) -> float:
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
    }
    if trainer.is_global_zero:
        write_sealed_json(cli.output_dir() / "result.json", result)
        log.info("best %s %.3f: %s", best.monitor, score, best.best_model_path)
    return score
