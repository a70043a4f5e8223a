"""The features stage: answered conversations → shards of the target's hidden states, resumable at the shard.

Shapes: T tokens of a sample, H hidden size, V target vocabulary, J teacher rows.
"""

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from eagle3.answers.store import MAKE_RESPONSES, ResponsesManifest, read_responses, read_rows, require_whole
from eagle3.errors import InputError
from eagle3.features.fp8 import ScaledRows, scaled
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
from eagle3.features.sample import Sample, positions_with_teacher
from eagle3.features.shards import StoreWriter, broken, hash_of
from eagle3.features.store import TARGET_WEIGHTS, save_target_weights
from eagle3.features.turns import anchors_of
from eagle3.storage.folder import Storage, sha256_stored
from eagle3.storage.place import open_folder
from eagle3.target.capture import Capture, Features, check_capture_layers, default_capture_layers, logit_transform_of
from eagle3.target.identity import require_same_target
from eagle3.target.model import Target

log = logging.getLogger(__name__)
STORED = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "fp8": torch.float8_e4m3fn}
BATCHES_IN_WINDOW = 16  # samples sorted by length together, so that little of a batch is padding


@dataclass(frozen=True)
class Conversation:
    """A row of responses.jsonl as tensors."""

    id: str
    input_ids: Int[Tensor, " T"]
    turns: Int[Tensor, " T"]


def extract_features(
    *,
    target: Target,
    out_dir: Path,
    path: str | None,
    capture_layers: list[int] | None,
    dtype: str,
    max_length: int,
    too_long: str,
    teachers: str,
    reasoning: list[str] | None,
    batch_tokens: int,
    shard_mb: int,
) -> Manifest:
    """Write `path`, or DIR/features, from DIR/responses and return the manifest; finished shards are kept.

    Raises InputError if the answers are another target's, or the folder holds features made otherwise.
    """
    responses = finished_responses(target, out_dir)
    assert responses.counts is not None and responses.files is not None  # it is complete
    transform = logit_transform_of(target)
    layers = check_capture_layers(capture_layers or default_capture_layers(len(target.layers)), len(target.layers))
    made_from = MadeFrom(
        target=responses.target,
        responses={
            **asdict(responses.made_with),
            "prompts_sha256": responses.prompts_sha256,
            "responses_sha256": responses.files["responses.jsonl"].sha256,
        },
        capture_layers=layers,
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
    extractor = Extractor(target, layers, STORED[dtype], teachers)
    writer = StoreWriter(storage, made_from, indices, shard_bytes=shard_mb * 2**20)
    write_shards(writer, extractor, conversations, total=responses.counts.rows, batch_tokens=batch_tokens)
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
        target_config=replace(target.facts, dtype=target.checkpoint_dtype or "bfloat16", logit_transform=transform),
        target_weights_sha256=sha256_stored(storage, TARGET_WEIGHTS),
        indices=indices,
        left_out=dict(left_out),
        instead_of=before,
    )


def finished_responses(target: Target, out_dir: Path) -> ResponsesManifest:
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


def read_conversations(
    responses: Path, *, max_length: int, too_long: str, left_out: Counter[str]
) -> Iterator[Conversation]:
    """Yield rows with something to train; the others are counted in `left_out` by reason."""
    if not (responses / "responses.jsonl").is_file():
        raise InputError(f"{responses}/responses.jsonl does not exist; make it with: {MAKE_RESPONSES}")
    for row in read_rows(responses):
        input_ids = torch.tensor(row.input_ids)
        turns = torch.zeros_like(input_ids)
        for number, (start, end) in enumerate(row.turns, start=1):
            turns[start:end] = number
        if len(input_ids) > max_length:
            left_out[f"longer than features.max_length={max_length}: {too_long}"] += 1
            if too_long == "drop":
                continue
            input_ids, turns = input_ids[:max_length], turns[:max_length]
        if len(anchors_of(turns)) == 0:
            left_out["no answer of two tokens or more"] += 1
            continue
        yield Conversation(row.id, input_ids, turns)


def windows(conversations: Iterator[Conversation], num_tokens: int) -> Iterator[list[Conversation]]:
    """Consecutive conversations of about `num_tokens` together."""
    window: list[Conversation] = []
    total = 0
    for conversation in conversations:
        window.append(conversation)
        total += len(conversation.input_ids)
        if total >= num_tokens:
            yield window
            window, total = [], 0
    if window:
        yield window


def write_shards(
    writer: StoreWriter,
    extractor: "Extractor",
    conversations: Iterator[Conversation],
    *,
    total: int,
    batch_tokens: int,
) -> None:
    """Extract what the writer's finished shards do not hold yet; an unfinished shard leaves nothing behind."""
    done = {sample_id for index in writer.indices for sample_id in index.ids()}
    try:
        with tqdm(desc="features", unit="sample", total=total) as progress:
            for window in windows(conversations, batch_tokens * BATCHES_IN_WINDOW):
                todo = [item for item in window if item.id not in done]
                for sample in extractor(todo, batch_tokens):
                    writer.add(sample)
                progress.update(len(window))
                if todo:
                    progress.set_postfix_str(f"{extractor.tokens / progress.format_dict['elapsed']:.0f} tokens/s")
        writer.close_shard()
    finally:
        writer.discard()


class Extractor:
    """Runs the target over conversations and keeps what training needs."""

    def __init__(self, target: Target, layers: list[int], dtype: torch.dtype, teachers: str) -> None:
        self.target, self.dtype, self.teachers = target, dtype, teachers
        self.capture = Capture(target, layers)
        self.tokens = 0

    def __call__(self, conversations: list[Conversation], batch_tokens: int) -> list[Sample]:
        """Samples in the order given; batches are formed by length."""
        by_length = sorted(range(len(conversations)), key=lambda number: len(conversations[number].input_ids))
        samples: dict[int, Sample] = {}
        while by_length:
            longest = len(conversations[by_length[-1]].input_ids)
            take = max(1, batch_tokens // longest)
            numbers, by_length = by_length[-take:], by_length[:-take]
            batch = [conversations[number] for number in numbers]
            padded = pad_sequence([item.input_ids for item in batch], batch_first=True)
            self.tokens += sum(len(item.input_ids) for item in batch)
            captured = self.capture(padded, [len(item.input_ids) for item in batch])
            for number, item, features in zip(numbers, batch, captured, strict=True):
                samples[number] = self._sample(item, features)
        return [samples[number] for number in range(len(conversations))]

    def _sample(self, item: Conversation, features: Features) -> Sample:
        has_teacher = positions_with_teacher(item.turns, self.teachers)
        last = features.last_hidden_state[has_teacher.to(features.last_hidden_state.device)]
        argmax = self._teacher_argmax(last)
        dtype = torch.float32 if self.dtype is torch.float8_e4m3fn else self.dtype
        aux, stored = features.aux_hidden_states.to(dtype), last.to(dtype)
        if not (aux.isfinite().all() and stored.isfinite().all()):
            raise InputError(
                f"features.dtype={str(self.dtype).removeprefix('torch.')}: hidden states of sample {item.id} are not "
                f"finite in it; take features.dtype=bfloat16 (float16 ends at 65504) and no target.dtype=float16"
            )
        return Sample(
            id=item.id,
            input_ids=item.input_ids,
            turns=item.turns,
            aux_hidden_states=self._packed(aux, len(self.capture.layers)).cpu(),
            last_hidden_state=self._packed(stored, 1).cpu(),
            teacher_argmax=argmax.cpu(),
            has_teacher=has_teacher,
        )

    def _packed(self, rows: Float[Tensor, "_ W"], layers: int) -> Float[Tensor, "_ W"] | ScaledRows:
        return scaled(rows, layers) if self.dtype is torch.float8_e4m3fn else rows

    @torch.no_grad()
    def _teacher_argmax(self, last: Float[Tensor, "J H"]) -> Int[Tensor, " J"]:
        """Return the argmax over the whole vocabulary, 1,024 rows at a time; no LogitTransform changes it."""
        head = self.target.lm_head
        chunks = last.to(head.device).split(1024)
        return torch.cat([torch.nn.functional.linear(chunk, head).float().argmax(-1) for chunk in chunks])
