"""Training with `data=live`: chooses who makes features and on which GPUs, and opens the source of a rank."""

import logging
import os
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities import rank_zero_only

from eagle3.answers.store import ANSWERS, read_answers
from eagle3.commands.devices import listed_devices, trains_on_gpu
from eagle3.commands.precompute import check_engine, check_layers, choose_features_engine, read_target
from eagle3.errors import InputError
from eagle3.features.source import as_setting
from eagle3.head_files.record import Origin
from eagle3.hydra_run import given_keys
from eagle3.settings.precomputing import CaptureRun
from eagle3.settings.training import DataSettings, TrainRun
from eagle3.storage.files import read_json, write_json
from eagle3.target.identity import recorded_settings
from eagle3.workers.task import WorkerId

if TYPE_CHECKING:
    from eagle3.features.live import LiveFeatures
    from eagle3.features.served import RunningServers
    from eagle3.target.stored import StoredTarget

log = logging.getLogger(__name__)

VISIBLE = "CUDA_VISIBLE_DEVICES"
SERVERS = "servers.json"  # in the folder of the run: what its first rank has started
POLL_S = 0.2
PASSES_CACHED = 4  # forward passes whose keys and values a server holds that shares a GPU
MOST_OF_SHARED = 0.7  # of a GPU's memory, for such a server
UNREAD = ("features.path", "features.shard_mb", "data.cache_dir", "data.cache_gb", "data.verify")


def with_choices(run: TrainRun) -> TrainRun:
    """Return a training with data=live as it runs: its target, its engine, and the GPUs of each."""
    for key in set(given_keys()).intersection(UNREAD):
        log.warning("%s has no effect with data=live, which stores nothing; leave it out", key)
    folders, live = answers_folders(run), of(run)
    if live.target.path is None:
        run = replace(run, target=recorded_settings(live.target, read_answers(folders[0]).target))
    run = replace(run, features=choose_features_engine(live, tell=log.info))
    if (engine := of(run).features.engine) is None:
        return run
    check_engine(of(run), servers=engine.servers, captures=True)
    return on_gpus(run)


def of(run: TrainRun) -> CaptureRun:
    assert run.live is not None
    return run.live


def answers_folders(run: TrainRun) -> list[Path]:
    given = run.data.read(DataSettings).path
    if not given:
        raise InputError("data.path is not set; data=live needs answers: give data.path=DIR/answers")
    paths = [given] if isinstance(given, str) else given
    for path in paths:
        if not Path(path, ANSWERS).is_file():
            raise InputError(
                f"data.path={path} has no {ANSWERS}, of which data=live makes features; give data.path=DIR/answers, or "
                f"leave out data=live to train on a store"
            )
    return [*map(Path, paths)]


# --- GPUs ------------------------------------------------------------------------------------------------------------


def placed(gpus: int, devices: Any, servers: int | None, tp_size: int) -> tuple[int, int, int]:
    """Return how many GPUs train, counted from the first; how many servers there are, and the first GPU of theirs.

    Servers have the GPUs after the trainer's, half where nothing says how many. Where all train, as the only one does,
    they share."""
    least, listed = (servers or 1) * tp_size, listed_devices(devices)
    if listed is None:
        trainers = gpus - least if servers else min(gpus - least, gpus // 2)
        listed = [*range(trainers if trainers > 0 else gpus)]
    first = max(listed) + 1
    if gpus - first >= least:
        return len(listed), servers or (gpus - first) // tp_size, first
    if gpus == first and gpus >= least:
        return len(listed), servers or gpus // tp_size, 0
    raise InputError(
        f"trainer.devices={devices} and features.engine.servers={servers or 1} with launch.tp_size={tp_size} do not "
        f"fit the {gpus} GPUs of this machine: servers have those after the trainer's last one, or the same if all of "
        f"them train; lower one of these keys"
    )


def on_gpus(run: TrainRun) -> TrainRun:
    """Give trainer and servers their GPUs, unless one of them has none or launch.env says which are the servers'."""
    from eagle3.engine.versions import count_gpus

    live, devices = of(run), run.trainer.keys["devices"]
    launch, engine = live.launch, live.features.engine
    if engine is None or not (launch.check and trains_on_gpu(run.trainer.keys)) or VISIBLE in (launch.env or {}):
        return run
    gpus = count_gpus(launch)
    trainers, servers, first = placed(gpus, devices, engine.servers, launch.tp_size)
    log.info("data=live: %d GPUs train, %d SGLang servers from GPU %d on", trainers, servers, first)
    if first:
        visible = os.environ.get(VISIBLE) or ",".join(map(str, range(gpus)))
        own = ",".join(visible.split(",")[first:])
        launch = replace(launch, env={**(launch.env or {}), VISIBLE: own})
    elif launch.mem_fraction_static is None:
        launch = replace(launch, mem_fraction_static=share_of_memory(live, read_target(live)))
        log.info("launch.mem_fraction_static=%.2f: weights, and the cache of %d forward passes; the trainer has the "
                 "rest", launch.mem_fraction_static, PASSES_CACHED)  # fmt: skip
    if listed_devices(devices) is None:
        run = replace(run, trainer=run.trainer.with_keys(devices=trainers))
    return replace(run, features=replace(live.features, engine=replace(engine, servers=servers)), launch=launch)


def share_of_memory(live: CaptureRun, target: "StoredTarget", total: int | None = None) -> float:
    """Return launch.mem_fraction_static of a server next to a trainer, on a GPU of `total` bytes."""
    facts, tokens = target.facts, PASSES_CACHED * live.features.batch_tokens
    cache = tokens * 2 * 2 * facts.num_layers * facts.num_kv_heads * facts.head_dim  # two of 16 bits
    total = total or torch.cuda.get_device_properties(0).total_memory
    share = (target.weights_bytes + cache) / live.launch.tp_size / total
    if share > MOST_OF_SHARED:
        raise InputError(
            f"data=live: next to the trainer, a server of target.path={target.path} would need {share:.0%} of a GPU of "
            f"{total / 2**30:.0f} GB; use another GPU for it, lower features.batch_tokens, set "
            f"launch.mem_fraction_static, or store the features first and leave out data=live"
        )
    return round(share + 0.005, 2)


# --- the source ------------------------------------------------------------------------------------------------------


def open_live(run: TrainRun, resumed: Origin | None, held: ExitStack) -> "LiveFeatures":
    """Open the source of this rank; `held` ends what it needs. The first rank starts the servers of all."""
    from eagle3.features.build import build_extractor, feature_settings

    live, target = on_own_gpu(run), read_target(of(run))
    check_layers(live, target)
    source = run.data.read(DataSettings).source
    assert source is not None
    opened: LiveFeatures = source.build(
        paths=answers_folders(run), target=target, settings=feature_settings(live, target)
    )
    path = as_setting(opened.location)
    if resumed and resumed.hash != opened.fingerprint:
        raise InputError(
            f"data.path={path}: the answers, the target or features.* are not those that ckpt_path={run.ckpt_path} "
            f"began with, and samples would be repeated or skipped; bring them back, or start a new training from its "
            f"head with init_from=HEAD"
        )
    log.info("%s: %d samples, %d tokens; left out: %s", path, len(opened.samples), opened.samples.tokens.sum(),
             dict(opened.left_out) or "none")  # fmt: skip
    told, asks = Path(run.run_dir, SERVERS), bool(live.features.engine and rank())
    running = running_servers(told, live.launch.start_timeout_s) if asks else None
    made_by = build_extractor(live, target, Path(run.run_dir, "logs"), WorkerId(), running=running)
    opened.extractor = held.enter_context(made_by)
    held.callback(opened.close)
    if live.features.engine and not asks:
        write_json(told, {"pid": os.getpid(), **asdict(opened.extractor.running)})  # type: ignore[attr-defined]
        held.callback(told.unlink, missing_ok=True)
    return opened


def rank() -> int:
    return rank_zero_only.rank  # type: ignore[attr-defined]


def on_own_gpu(run: TrainRun) -> CaptureRun:
    """Let Hugging Face compute on the GPU of this rank."""
    live, trainer = of(run), run.trainer.keys
    if live.features.engine or live.target.device != "auto" or not trains_on_gpu(trainer):
        return live
    listed = listed_devices(trainer["devices"])
    gpu = listed[rank()] if listed else rank()
    return replace(live, target=replace(live.target, device=f"cuda:{gpu}"))


def running_servers(path: Path, seconds: float) -> "RunningServers":
    """Wait for the servers of the first rank; a file that a killed run has left is none."""
    from eagle3.features.served import RunningServers
    from eagle3.target.facts import LogitTransform

    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with suppress(InputError, ProcessLookupError):
            told = read_json(path, made_by="train.py")
            os.kill(told["pid"], 0)
            return RunningServers(told["servers"], LogitTransform(**told["logit_transform"]))
        time.sleep(POLL_S)
    raise InputError(f"launch.start_timeout_s={seconds:g}: the first rank has not started any server; see its messages")
