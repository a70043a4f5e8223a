"""From a config to features: the stage in the driver, and the extractor in a worker."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from eagle3 import cli
from eagle3.answers.build import checked_target
from eagle3.engine.local_servers import for_worker
from eagle3.errors import InputError, first_line
from eagle3.features.extract import STORED, FeatureSettings, extract_features
from eagle3.features.huggingface import BATCHES_IN_WINDOW, HuggingFaceExtractor
from eagle3.features.manifest import Manifest
from eagle3.features.store import TARGET_WEIGHTS
from eagle3.features.task import Extractor, Sharding
from eagle3.settings.engine import LaunchSettings
from eagle3.settings.precomputing import CaptureSettings
from eagle3.storage.folder import Storage, open_folder
from eagle3.target.capture import check_capture_layers, default_capture_layers
from eagle3.target.device import free_bytes
from eagle3.target.model import load_target, resolved_dtype, unload
from eagle3.target.stored import StoredTarget, stored_target
from eagle3.workers.build import target_on_gpu, workers_of
from eagle3.workers.task import WorkerId

if TYPE_CHECKING:
    from eagle3.features.capture_check import Sentinel
    from eagle3.features.served import ServedExtractor

log = logging.getLogger(__name__)


def extract(config: DictConfig, target: StoredTarget) -> Manifest:
    """Run the features stage."""
    engine, out_dir = config.features.engine, Path(config.out_dir)
    return extract_features(
        target=target,
        settings=feature_settings(config, target),
        workers=workers_of(config, servers=engine and (engine.servers or 1)),
        build=partial(sharding, cli.resolved(config), out_dir / "logs"),
        out_dir=out_dir,
        storage=feature_folder(config),
        shard_mb=config.features.shard_mb,
        window_tokens=config.features.batch_tokens * BATCHES_IN_WINDOW,
    )


def feature_folder(config: DictConfig) -> Storage:
    return open_folder(config.features.path or Path(config.out_dir) / "features", setting="features.path")


def feature_settings(config: DictConfig, target: StoredTarget) -> FeatureSettings:
    features, num_layers = cli.plain(config.features), target.text_config.num_hidden_layers
    layers = features["capture_layers"] or default_capture_layers(num_layers)
    return FeatureSettings(
        captured_by="sglang" if features["engine"] else "huggingface",
        target_dtype=target_dtype(config, target),
        capture_layers=check_capture_layers(layers, num_layers),
        **{key: features[key] for key in ("dtype", "max_length", "too_long", "teachers", "reasoning")},
    )


def target_dtype(config: DictConfig, target: StoredTarget) -> str:
    """Return the dtype that hidden states are computed in, as far as this process can know it."""
    if config.features.engine:
        return config.launch.dtype
    dtype = resolved_dtype(config.target.dtype, on_cpu=not target_on_gpu(config))
    return (target.checkpoint_dtype or dtype) if dtype == "auto" else dtype


@contextmanager
def sharding(config: DictConfig, folder: Path, worker: WorkerId) -> Iterator[Sharding]:
    """Make the task of a worker; `folder` takes the logs of servers."""
    target = stored_target(**cli.plain(config.target))
    settings = feature_settings(config, target)
    parts: dict[str, Any] = {
        "layers": settings.capture_layers,
        "teachers": settings.teachers,
        "batch_tokens": config.features.batch_tokens,
    }
    extractor: Extractor
    if config.features.engine is None:
        extractor = HuggingFaceExtractor(target=checked_target(config), dtype=STORED[settings.dtype], **parts)
    else:
        extractor = _served(config, target, folder / worker.folder, worker, dtype=settings.dtype, **parts)
    storage = feature_folder(config)
    if not storage.names(TARGET_WEIGHTS):
        raise InputError(
            f"{storage.location} is not the folder that the driver sees; let all nodes share it, or write to a bucket: "
            f"features.path=s3://BUCKET/FOLDER"
        )
    with extractor:
        yield Sharding(extractor, storage)


def _served(
    config: DictConfig, target: StoredTarget, folder: Path, worker: WorkerId, **parts: Any
) -> "ServedExtractor":
    from eagle3.features.served import ServedExtractor

    unload()  # the GPU is the servers'
    settings = cli.settings(CaptureSettings, config.features.engine)
    launch = for_worker(cli.settings(LaunchSettings, config.launch), worker)
    sentinels = sentinels_for(config, target, parts["layers"])
    return ServedExtractor(settings, target=target, sentinels=sentinels, launch=launch, folder=folder, **parts)


def sentinels_for(config: DictConfig, target: StoredTarget, layers: list[int]) -> "list[Sentinel]":
    """Return the reference for an engine: Hugging Face's states, if the target fits into memory here and loads."""
    from eagle3.features.capture_check import computed_sentinels, plain_sentinels

    free = free_bytes(config.target.device)
    if target.weights_bytes < free / 2:  # twice: in float32 on a CPU
        try:
            return computed_sentinels(load_target(**cli.plain(config.target)), layers)
        except (InputError, ImportError, RuntimeError) as error:  # at its load, or of kernels that a forward lacks
            without = first_line(error)
        finally:
            unload()
    else:
        without = f"its {target.weights_bytes / 1e9:.0f} GB do not fit into half of {free / 1e9:.0f} GB of free memory"
    log.warning("no forward of Hugging Face: %s; SGLang's states are compared only with its own logits", without)
    return plain_sentinels(target)
