"""The features stage: answered conversations → shards of the target's hidden states, resumable at the shard."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from eagle3.answers.store import MAKE_ANSWERS, AnswersManifest, read_answers, require_whole
from eagle3.errors import InputError
from eagle3.features.conversation import Conversation, SampleSizer, read_conversations, work_units
from eagle3.features.manifest import MadeFrom, Manifest
from eagle3.features.store_writer import StoreWriter
from eagle3.storage.folder import Storage
from eagle3.target.identity import require_same_target
from eagle3.target.stored import StoredTarget
from eagle3.workers.meter import Meter, Progress
from eagle3.workers.task import Build, Workers

STORED = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True, kw_only=True)
class FeatureSettings:
    """The keys of the same names in conf/features that decide what a sample holds; who captures, computing in what."""

    captured_by: str
    target_dtype: str
    capture_layers: list[int]
    dtype: str
    max_length: int
    too_long: str
    teachers: str
    reasoning: list[str] | None


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
    answers = finished_answers(target, out_dir)
    store = StoreWriter(storage, made_from(target, answers, settings))
    weights_dtype = torch.bfloat16 if settings.dtype == "fp8" else STORED[settings.dtype]
    store.save_weights(target, dtype=weights_dtype)
    left_out: Counter[str] = Counter()
    conversations = read_conversations(
        out_dir / "answers", max_length=settings.max_length, too_long=settings.too_long, left_out=left_out
    )
    sizer = SampleSizer(
        layers=len(settings.capture_layers),
        hidden_size=target.facts.hidden_size,
        dtype=STORED[settings.dtype],
        teachers=settings.teachers,
    )
    shard_bytes = shard_mb * 2**20
    assert answers.counts is not None  # it is complete
    with Meter(answers.counts.rows, desc="features", unit="sample", of="tokens") as progress:
        rest = not_done(conversations, store.ids(), progress)
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


def made_from(target: StoredTarget, answers: AnswersManifest, settings: FeatureSettings) -> MadeFrom:
    assert answers.files is not None  # it is complete
    values = asdict(settings)
    markers = values.pop("reasoning")
    return MadeFrom(
        target=answers.target,
        responses={
            **asdict(answers.made_with),
            "prompts_sha256": answers.prompts_sha256,
            "responses_sha256": answers.files["answers.jsonl"].sha256,
        },
        reasoning_ids=None if markers is None else [ids_in_text(target.tokenizer, each) for each in markers],
        **values,
    )


def finished_answers(target: StoredTarget, out_dir: Path) -> AnswersManifest:
    """Read the manifest of finished answers of this target."""
    answers = read_answers(out_dir / "answers")
    require_same_target(
        answers.target,
        target.identity.with_template(answers.target.template_hash),
        expected_from=f"{out_dir}/answers",
        actual_from=f"target.path={target.path}",
    )
    if not answers.complete:
        raise InputError(f"{out_dir}/answers is not complete; finish it with: {MAKE_ANSWERS}")
    require_whole(out_dir / "answers", answers)
    return answers


def ids_in_text(tokenizer: PreTrainedTokenizerBase, marker: str) -> list[int]:
    """What an answer holds for `marker`: SentencePiece puts a space before a text that stands alone."""
    before, together, alone = (
        tokenizer.encode(text, add_special_tokens=False) for text in ("\n", f"\n{marker}", marker)
    )
    return together[len(before) :] if together[: len(before)] == before else alone


def not_done(conversations: Iterator[Conversation], done: set[str], progress: Progress) -> Iterator[Conversation]:
    for conversation in conversations:
        if conversation.id in done:
            progress.add(ended=1)
        else:
            yield conversation
