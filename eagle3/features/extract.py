"""The features stage: answered conversations → shards of the target's hidden states, resumable at the shard.

Shapes: T tokens of a sample, H hidden size, V target vocabulary, J teacher rows.
"""

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from eagle3.answers.store import MAKE_RESPONSES, ResponsesManifest, read_responses, require_whole
from eagle3.errors import InputError
from eagle3.features.conversation import Conversation, read_conversations
from eagle3.features.extractor import Extractor
from eagle3.features.index import ShardIndex
from eagle3.features.manifest import (
    MANIFEST,
    MadeFrom,
    Manifest,
    index_name,
    read_index,
    read_manifest,
    require_different_ids,
    write_manifest,
)
from eagle3.features.shards import StoreWriter, broken, hash_of
from eagle3.features.store import TARGET_WEIGHTS, save_target_weights
from eagle3.storage.folder import Storage, sha256_stored
from eagle3.storage.place import open_folder
from eagle3.target.identity import require_same_target
from eagle3.target.model import Target
from eagle3.target.stored import StoredTarget

log = logging.getLogger(__name__)
STORED = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "fp8": torch.float8_e4m3fn}


def extract_features(
    *,
    target: Target | StoredTarget,
    extractor: Extractor,
    out_dir: Path,
    path: str | None,
    capture_layers: list[int],
    dtype: str,
    max_length: int,
    too_long: str,
    teachers: str,
    reasoning: list[str] | None,
    shard_mb: int,
) -> Manifest:
    """Write `path`, or DIR/features, from DIR/responses and return the manifest; finished shards are kept.

    Raises InputError if the answers are another target's, or the folder holds features made otherwise.
    """
    responses = finished_responses(target, out_dir)
    assert responses.counts is not None and responses.files is not None  # it is complete
    made_from = MadeFrom(
        target=responses.target,
        responses={
            **asdict(responses.made_with),
            "prompts_sha256": responses.prompts_sha256,
            "responses_sha256": responses.files["responses.jsonl"].sha256,
        },
        capture_layers=capture_layers,
        captured_by=extractor.captured_by,
        dtype=dtype,
        max_length=max_length,
        too_long=too_long,
        teachers=teachers,
        reasoning_ids=None if reasoning is None else [ids_in_text(target.tokenizer, each) for each in reasoning],
    )
    storage = open_folder(path or out_dir / "features", setting="features.path")
    before = storage.version(MANIFEST)
    indices = complete_shards(storage, made_from)
    if not (indices and storage.names(TARGET_WEIGHTS)):  # gigabytes; those beside finished shards are this target's
        weights_dtype = torch.bfloat16 if dtype == "fp8" else STORED[dtype]
        save_target_weights(storage, target.embedding, target.lm_head, dtype=weights_dtype)
    left_out: Counter[str] = Counter()
    conversations = read_conversations(
        out_dir / "responses", max_length=max_length, too_long=too_long, left_out=left_out
    )
    writer = StoreWriter(storage, made_from, indices, shard_bytes=shard_mb * 2**20)
    write_shards(writer, extractor, conversations, total=responses.counts.rows)
    left_out += extractor.left_out
    if not indices:
        raise InputError(
            f"{out_dir}/responses holds no answer that can be trained; left out: {dict(left_out)}; an answer needs "
            f"two tokens within features.max_length={max_length}: raise that, or responses.max_new_tokens (in another "
            f"out_dir)"
        )
    if not extractor.tokens:
        log.info("%s is up to date", storage.location)
    return write_manifest(
        storage,
        made_from=made_from,
        target_config=replace(
            target.facts, dtype=target.checkpoint_dtype or "bfloat16", logit_transform=extractor.logit_transform()
        ),
        target_weights_sha256=sha256_stored(storage, TARGET_WEIGHTS),
        indices=indices,
        left_out=dict(left_out),
        instead_of=before,
    )


def finished_responses(target: Target | StoredTarget, out_dir: Path) -> ResponsesManifest:
    """Read the manifest of finished answers of this target."""
    responses = read_responses(out_dir / "responses")
    require_same_target(
        responses.target,
        target.identity.with_template(responses.target.template_hash),
        expected_from=f"{out_dir}/responses",
        actual_from=f"target.path={target.path}",
    )
    if not responses.complete:
        raise InputError(f"{out_dir}/responses is not complete; finish it with: {MAKE_RESPONSES}")
    require_whole(out_dir / "responses", responses)
    return responses


def ids_in_text(tokenizer: PreTrainedTokenizerBase, marker: str) -> list[int]:
    """What an answer holds for `marker`: SentencePiece puts a space before a text that stands alone."""
    before, together, alone = (
        tokenizer.encode(text, add_special_tokens=False) for text in ("\n", f"\n{marker}", marker)
    )
    return together[len(before) :] if together[: len(before)] == before else alone


def complete_shards(storage: Storage, made_from: MadeFrom) -> list[ShardIndex]:
    """Return the indices of the shards that an earlier run finished, in order."""
    there = {index_name(name) for name in storage.names("shard-*.tar")}
    indices = [read_index(storage, name) for name in storage.names("shard-*.index") if name in there]
    require_different_ids(storage, indices)
    for index in indices:
        facts = index.facts
        if storage.size(facts.shard) != facts.bytes:
            held = f"holds {storage.size(facts.shard)} bytes instead of {facts.bytes}"
            raise broken(f"{storage.location}/{facts.shard}", held)
        if facts.made_from != hash_of(made_from):
            raise InputError(
                f"{storage.location}/{facts.shard} was made otherwise than this run's would be "
                f"({what_differs(storage, made_from)}); choose another out_dir, or delete {storage.location}"
            )
    return indices


def what_differs(storage: Storage, made_from: MadeFrom) -> str:
    """Say which settings a finished store has other values of; shards alone hold no more than a hash of them."""
    if not storage.names(MANIFEST):
        return "another target, template, sampling or features.* setting"
    return read_manifest(storage).made_from.differences(made_from)


def write_shards(
    writer: StoreWriter, extractor: Extractor, conversations: Iterator[Conversation], *, total: int
) -> None:
    """Extract what the writer's finished shards do not hold yet; an unfinished shard leaves nothing behind."""
    done = {sample_id for index in writer.indices for sample_id in index.ids()}
    try:
        with tqdm(desc="features", unit="sample", total=total) as progress:
            for sample in extractor(_not_done(conversations, done, progress)):
                writer.add(sample)
                progress.update()
                progress.set_postfix_str(
                    f"{extractor.tokens / progress.format_dict['elapsed']:.0f} tokens/s", refresh=False
                )
        writer.close_shard()
    finally:
        writer.discard()


def _not_done(conversations: Iterator[Conversation], done: set[str], progress: tqdm) -> Iterator[Conversation]:
    for conversation in conversations:
        if conversation.id in done:
            progress.update()
        else:
            yield conversation
