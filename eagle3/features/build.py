"""The features stage: answered conversations → shards of the target's hidden states, resumable at the shard."""

import logging
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from eagle3.answers.build import checked_target
from eagle3.answers.chat import ids_in_text
from eagle3.answers.store import MAKE_ANSWERS, AnswersManifest, read_answers, require_whole
from eagle3.engine.command import computed_in
from eagle3.engine.local_servers import for_worker
from eagle3.errors import InputError, first_line
from eagle3.features.conversation import Conversation, SampleSizer, read_conversations, work_units
from eagle3.features.huggingface import BATCHES_IN_WINDOW, HuggingFaceExtractor
from eagle3.features.manifest import TARGET_WEIGHTS, MadeFrom, Manifest
from eagle3.features.store_writer import StoreWriter
from eagle3.features.task import Extractor, Sharding
from eagle3.settings.precomputing import CaptureRun, PrecomputeRun, SampleSettings, TargetSettings
from eagle3.storage.folder import Storage, open_folder
from eagle3.target.capture import check_capture_layers, default_capture_layers
from eagle3.target.checkpoint_files import WrongWeights
from eagle3.target.device import free_bytes
from eagle3.target.facts import layer_count
from eagle3.target.identity import require_same_target
from eagle3.target.model import load_target, resolved_dtype, unload
from eagle3.target.stored import StoredTarget, stored_target
from eagle3.workers.build import build_workers, target_on_gpu
from eagle3.workers.meter import Meter, Progress
from eagle3.workers.task import Build, WorkerId, Workers

if TYPE_CHECKING:
    from eagle3.features.capture_check import Sentinel
    from eagle3.features.served import RunningServers

log = logging.getLogger(__name__)

STORED = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True, kw_only=True)
class FeatureSettings(SampleSettings):
    """Content of a sample, the captured layers, who captures them, and the dtype that the target computes in."""

    captured_by: str
    target_dtype: str
    capture_layers: list[int]


def extract(run: PrecomputeRun, target: StoredTarget) -> Manifest:
    engine, out_dir = run.features.engine, run.folder
    return extract_features(
        target=target,
        settings=feature_settings(run, target),
        workers=build_workers(run, servers=(engine.servers or 1) if engine else None),
        build=partial(sharding, run, out_dir / "logs"),
        out_dir=out_dir,
        storage=feature_folder(run),
        shard_mb=run.features.shard_mb,
        window_tokens=run.features.batch_tokens * BATCHES_IN_WINDOW,
    )


def feature_folder(run: PrecomputeRun) -> Storage:
    return open_folder(run.features.path or run.folder / "features", setting="features.path")


def feature_settings(run: CaptureRun, target: StoredTarget) -> FeatureSettings:
    features, num_layers = run.features, layer_count(target.text_config)
    layers = features.capture_layers or default_capture_layers(num_layers)
    return FeatureSettings(
        captured_by="sglang" if features.engine else "huggingface",
        target_dtype=target_dtype(run, target),
        capture_layers=check_capture_layers(layers, num_layers),
        **vars(features.only(SampleSettings)),
    )


def target_dtype(run: CaptureRun, target: StoredTarget) -> str:
    """Return the dtype that hidden states are computed in, as far as this process can know it."""
    if run.features.engine:
        return computed_in(run.launch)
    dtype = resolved_dtype(run.target.dtype, on_cpu=not target_on_gpu(run))
    return (target.checkpoint_dtype or dtype) if dtype == "auto" else dtype


def extract_features(
    *,
    target: StoredTarget,
    settings: FeatureSettings,
    workers: Workers,
    build: Build,
    out_dir: Path,
    storage: Storage,
    shard_mb: float,
    window_tokens: int,
) -> Manifest:
    """Write `storage` from DIR/answers by tasks of task.Sharding, and return the manifest; finished
    shards are kept. A worker holds conversations of about `window_tokens` tokens.

    Raises InputError if the answers are another target's, or the folder holds features made otherwise.
    """
    answers = finished_answers(target, out_dir / "answers")
    store = StoreWriter(storage, made_from(target, answers, settings))
    read = partial(read_conversations, out_dir / "answers", max_length=settings.max_length, too_long=settings.too_long)
    if store.indices:
        store.require_same_answers(read(left_out=Counter()), answers=out_dir / "answers/answers.jsonl")
        log.info("%s: kept %d samples in %d shards", storage.location, len(store.ids()), len(store.indices))
    store.save_weights(target, dtype=weights_dtype(settings))
    left_out: Counter[str] = Counter()
    sizer = SampleSizer(
        layers=len(settings.capture_layers),
        hidden_size=target.facts.hidden_size,
        dtype=STORED[settings.dtype],
        teachers=settings.teachers,
    )
    shard_bytes = shard_mb * 2**20
    assert answers.counts is not None  # it is complete
    with Meter(answers.counts.rows, desc="features", unit="sample", of="tokens") as progress:
        rest = not_done(read(left_out=left_out), store.ids(), progress)
        units = work_units(rest, taken=store.numbers(), made_from=store.hash, sizer=sizer, shard_bytes=shard_bytes)
        ahead = 2 + math.ceil(window_tokens / sizer.tokens_in(shard_bytes))
        for results in workers(build, store.at_least_one(units), progress, ahead=ahead):
            for _, made in results:
                store.take(made)
                left_out += Counter(made.left_out)
    if not store.indices:
        raise InputError(
            f"{out_dir}/answers holds no answer that can be trained; left out: {dict(left_out)}; an answer needs "
            f"two tokens within features.max_length={settings.max_length}: raise that, or sampling.max_new_tokens (in "
            f"another out_dir)"
        )
    return store.finish(target, left_out=left_out)


def weights_dtype(settings: SampleSettings) -> torch.dtype:
    """Return the dtype of the target's embedding and lm_head next to features of these settings."""
    return torch.bfloat16 if settings.dtype == "fp8" else STORED[settings.dtype]


def made_from(target: StoredTarget, answers: AnswersManifest, settings: FeatureSettings) -> MadeFrom:
    values = asdict(settings)
    markers = values.pop("reasoning")
    return MadeFrom(
        target=answers.target,
        responses=answers.identity(),
        reasoning_ids=None if markers is None else [ids_in_text(target.tokenizer, each) for each in markers],
        **values,
    )


def finished_answers(target: StoredTarget, folder: Path) -> AnswersManifest:
    answers = read_answers(folder)
    require_same_target(
        answers.target,
        target.identity.with_template(answers.target.template_hash),
        expected_from=str(folder),
        actual_from=f"target.path={target.path}",
    )
    if not answers.complete:
        raise InputError(f"{folder} is not complete; finish it with: {MAKE_ANSWERS}")
    require_whole(folder, answers)
    return answers


def not_done(conversations: Iterator[Conversation], done: set[str], progress: Progress) -> Iterator[Conversation]:
    for conversation in conversations:
        if conversation.id in done:
            progress.add(ended=1)
        else:
            yield conversation


@contextmanager
def sharding(run: PrecomputeRun, folder: Path, worker: WorkerId) -> Iterator[Sharding]:
    """Make the task of a worker; `folder` takes the logs of servers."""
    target = stored_target(**vars(run.target))
    extractor = build_extractor(run, target, folder, worker)
    storage = feature_folder(run)
    if not storage.names(TARGET_WEIGHTS):
        raise InputError(
            f"{storage.location} is not the folder that the driver sees; let all nodes share it, or write to a bucket: "
            f"features.path=s3://BUCKET/FOLDER"
        )
    with extractor:
        yield Sharding(extractor, storage)


def build_extractor(
    run: CaptureRun,
    target: StoredTarget,
    folder: Path,
    worker: WorkerId,
    *,
    running: "RunningServers | None" = None,
) -> Extractor:
    """Make what the run captures features with; it is not ready yet. `running`: see ServedExtractor."""
    settings = feature_settings(run, target)
    parts: dict[str, Any] = {
        "layers": settings.capture_layers,
        "teachers": settings.teachers,
        "batch_tokens": run.features.batch_tokens,
    }
    if run.features.engine is None:
        return HuggingFaceExtractor(target=checked_target(run), dtype=STORED[settings.dtype], **parts)
    from eagle3.features.served import ServedExtractor

    unload()  # the GPU is the servers'
    return ServedExtractor(
        run.features.engine,
        target=target,
        dtype=settings.dtype,
        sentinels=[] if running else sentinels_for(run.target, target, settings.capture_layers),
        launch=for_worker(run.launch, worker),
        folder=folder / worker.folder,
        running=running,
        **parts,
    )


def sentinels_for(settings: TargetSettings, target: StoredTarget, layers: list[int]) -> "list[Sentinel]":
    """Return the reference for an engine: Hugging Face's states, if the target fits into memory here and loads."""
    from eagle3.features.capture_check import computed_sentinels, plain_sentinels

    free = free_bytes(settings.device)
    if target.weights_bytes < free / 2:  # twice: in float32 on a CPU
        try:
            return computed_sentinels(load_target(**vars(settings)), layers)
        except (InputError, ImportError, RuntimeError) as error:  # at its load, or of kernels that a forward lacks
            if isinstance(error, WrongWeights) and target.quantization is None:
                raise  # an engine may compute with whatever its memory holds in their place
            without = first_line(error)
        finally:
            unload()
    else:
        without = f"its {target.weights_bytes / 1e9:.0f} GB do not fit into half of {free / 1e9:.0f} GB of free memory"
    log.warning("no forward of Hugging Face: %s; SGLang's states are compared only with its own logits", without)
    return plain_sentinels(target)
