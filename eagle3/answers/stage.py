"""The responses stage: prompts.jsonl → responses.jsonl, by the target or imported; resumes prompt by prompt."""

import json
import logging
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from eagle3.answers.chat import Chat
from eagle3.answers.dialogue import Dialogue, imported_rows
from eagle3.answers.generate import generate
from eagle3.errors import InputError
from eagle3.storage import json_line, read_json, read_jsonl, sha256_file, write_json, write_jsonl
from eagle3.target.model import Target, require_same_target

log = logging.getLogger(__name__)

MADE_BY = "python precompute.py 'stages=[prompts]'"


def answer_prompts(
    *,
    target: Target,
    chat: Chat,
    out_dir: str | Path,
    answers: str,
    batch_size: int,
    batch_tokens: int,
    window: int,
    max_new_tokens: int,
    max_prompt_tokens: int | None,
    temperature: float,
    top_p: float,
    top_k: int,
    seed: int,
    on_length: str,
) -> dict[str, Any]:
    """Answer the prompts in `out_dir`/prompts that have no answer yet, and return the manifest."""
    sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "max_new_tokens": max_new_tokens}
    _check_settings(answers, on_length, batch_size=batch_size, batch_tokens=batch_tokens, window=window, **sampling)
    store = ResponseStore(Path(out_dir))
    made_with: dict[str, Any] = {"answers": answers, "chat": chat.settings}
    if answers == "target":
        made_with |= {"sampling": sampling, "seed": seed, "on_length": on_length}
    fingerprint = target.fingerprint | {"template_hash": chat.settings["template_hash"]}
    pending = store.open({"target": fingerprint, **made_with})
    if not pending:
        log.info("%s is up to date", store.responses)
        return store.close()
    context = getattr(target.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    limit = _prompt_limit(context, max_new_tokens, max_prompt_tokens)
    with tqdm(total=pending, unit="prompt", desc="responses", smoothing=0.05) as progress:
        for prompts in _batched(store.pending_prompts(), window):
            if answers == "imported":
                finished = [
                    imported_rows(prompt, chat, max_prompt_tokens=max_prompt_tokens, context=context)
                    for prompt in prompts
                ]
                progress.update(len(prompts))
            else:
                dialogues = [
                    Dialogue(prompt, chat, seed=seed, max_prompt_tokens=limit, on_length=on_length)
                    for prompt in prompts
                ]
                answer_window(
                    dialogues,
                    target,
                    progress=progress,
                    batch_size=batch_size,
                    batch_tokens=batch_tokens,
                    **sampling,
                )
                finished = [(dialogue.rows, dialogue.errors) for dialogue in dialogues]
            store.append(finished)
    return store.close()


def answer_window(
    dialogues: list[Dialogue], target: Target, *, progress: tqdm, batch_size: int, batch_tokens: int, **sampling: Any
) -> None:
    """Answer all turns of all dialogues: turn after turn, shortest prompts first, so that a batch is of one length."""
    progress.update(sum(not dialogue.waiting for dialogue in dialogues))
    answer_tokens, started = 0, time.perf_counter()
    while waiting := [dialogue for dialogue in dialogues if dialogue.waiting]:
        waiting.sort(key=lambda dialogue: len(dialogue.prompt_ids))
        for batch in _batches(waiting, rows=batch_size, tokens=batch_tokens, room=sampling["max_new_tokens"]):
            answer_tokens += _answer_batch(batch, target, sampling)
            progress.update(sum(not dialogue.waiting for dialogue in batch))
            rate = answer_tokens / (time.perf_counter() - started)
            progress.set_postfix_str(f"{rate:.0f} answer tokens/s")


def _batches(waiting: list[Dialogue], *, rows: int, tokens: int, room: int) -> Iterator[list[Dialogue]]:
    """Shortest first; rows are padded to the longest, so a batch takes as many as fit `tokens` with their answers."""
    batch: list[Dialogue] = []
    for dialogue in waiting:
        padded = (len(batch) + 1) * (len(dialogue.prompt_ids) + room)
        if batch and (len(batch) == rows or padded > tokens):
            yield batch
            batch = []
        batch.append(dialogue)
    if batch:
        yield batch


def _answer_batch(batch: list[Dialogue], target: Target, sampling: dict[str, Any], *, may_halve: bool = True) -> int:
    """Tokens answered. A batch that fails is halved: once, or until it fits where memory is what lacked."""
    out_of_memory = False
    try:
        answers = generate(
            target.model,
            [dialogue.prompt_ids for dialogue in batch],
            seeds=[dialogue.seed for dialogue in batch],
            stop_ids=target.stop_ids,
            pad_id=target.tokenizer.pad_token_id or 0,
            **sampling,
        )
    except Exception as error:  # whatever it is, the other batches must not be lost
        out_of_memory = isinstance(error, torch.OutOfMemoryError)
        reason = f"{type(error).__name__} ({str(error).partition(chr(10))[0][:200]})"
    else:
        for dialogue, answer in zip(batch, answers, strict=True):
            dialogue.answer(answer)
        return sum(len(answer.token_ids) for answer in answers)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if (may_halve or out_of_memory) and len(batch) > 1:
        log.warning("a batch of %d failed (%s); trying its halves (see responses.batch_size)", len(batch), reason)
        middle = len(batch) // 2
        halves = (batch[:middle], batch[middle:])
        return sum(_answer_batch(half, target, sampling, may_halve=False) for half in halves)
    for dialogue in batch:
        dialogue.fail(reason)
    return 0


class ResponseStore:
    """The files of OUT/responses: what is done, what is to do, and what it was made with."""

    def __init__(self, out_dir: Path):
        self.prompts = out_dir / "prompts" / "prompts.jsonl"
        self.folder = out_dir / "responses"
        self.responses = self.folder / "responses.jsonl"
        self.errors = self.folder / "errors.jsonl"
        self.manifest = self.folder / "manifest.json"
        self.done: set[str] = set()
        self.header: dict[str, Any] = {}

    def open(self, made_with: dict[str, Any]) -> int:
        """Count the prompts to answer. Refuses to go on with answers that were made in another way."""
        if not self.prompts.is_file():
            raise InputError(f"{self.prompts} does not exist; make it with: {MADE_BY}")
        self.header = {"format": 1, **made_with, "prompts_sha256": sha256_file(self.prompts)}
        if self.manifest.exists():
            self._require_same(read_json(self.manifest, made_by="python precompute.py 'stages=[responses]'"))
        self.folder.mkdir(parents=True, exist_ok=True)
        self.done = _keep_whole_prompts(self.responses)
        final = [row for row in self._read_errors() if row["prompt_id"] in self.done or not row["retry"]]
        self.done |= {row["prompt_id"] for row in final}
        pending = sum(1 for _ in self.pending_prompts())
        if pending:
            write_json(self.manifest, {**self.header, "complete": False})
            write_jsonl(self.errors, final)
        return pending

    def pending_prompts(self) -> Iterator[dict[str, Any]]:
        return (prompt for prompt in read_jsonl(self.prompts) if prompt["id"] not in self.done)

    def append(self, finished: Iterable[tuple[list[dict], list[dict]]]) -> None:
        """Add the rows and errors of prompts; errors first: those that a kill leaves without rows are dropped."""
        finished = list(finished)
        for rows, _ in finished:
            for row in rows:
                row["last_of_prompt"] = row is rows[-1]
        self._append(self.errors, [error for _, errors in finished for error in errors])
        self._append(self.responses, [row for rows, _ in finished for row in rows])

    def close(self) -> dict[str, Any]:
        """Count what is on disk into the manifest."""
        counts = _count(read_jsonl(self.responses), self._read_errors())
        if not counts["rows"]:
            imported = "; drop responses.answers=imported, or give rows with answers and run all stages with it"
            way_out = imported if self.header["answers"] == "imported" else ""
            raise InputError(f"{self.responses} is empty, nothing could be answered: {counts['errors']}{way_out}")
        if counts["errors"]:
            log.warning("%d turns or prompts gave no row, see %s", sum(counts["errors"].values()), self.errors)
        manifest = {**self.header, "complete": True, **counts}
        write_json(self.manifest, manifest)
        return manifest

    def _append(self, path: Path, rows: list[dict]) -> None:
        try:
            with path.open("ab") as file:
                file.write(b"".join(map(json_line, rows)))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise InputError(
                f"{path} cannot be written ({error.strerror}); make room and run again: it goes on where it stopped"
            ) from None

    def _read_errors(self) -> Iterator[dict[str, Any]]:
        return read_jsonl(self.errors) if self.errors.exists() else iter(())

    def _require_same(self, manifest: dict[str, Any]) -> None:
        way_out = f"choose another out_dir, or delete {self.folder}"
        require_same_target(
            manifest["target"], self.header["target"], expected_from=str(self.folder), actual_from="target.path"
        )
        before, now = _flat({key: manifest[key] for key in self.header if key in manifest}), _flat(self.header)
        settings = {key: (before.get(key, "unset"), now.get(key, "unset")) for key in before | now}
        changes = [
            f"{key}={then} then, {value} now"
            for key, (then, value) in settings.items()
            if then != value and not key.startswith("target.")
        ]
        if changes:
            raise InputError(f"{self.folder} was made with other settings ({', '.join(changes)}); {way_out}")


def _keep_whole_prompts(path: Path) -> set[str]:
    """Ids of the prompts whose rows are all there; what a kill left of another one at the end is cut off."""
    done: set[str] = set()
    if not path.exists():
        path.touch()
    offset = whole = 0
    with path.open("r+b") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            offset += len(line)
            try:
                row = json.loads(line)
                prompt_id, last = row["prompt_id"], row["last_of_prompt"]
            except (ValueError, KeyError, TypeError):
                raise InputError(f"{path} line {number} is damaged; delete {path.parent} and run again") from None
            if last:
                done.add(prompt_id)
                whole = offset
        file.truncate(whole)
    return done


def _count(rows: Iterable[dict[str, Any]], errors: Iterable[dict[str, Any]]) -> dict[str, Any]:
    total: Counter[str] = Counter(rows=0, turns=0, answer_tokens=0)
    prompts: set[str] = set()
    finish_reasons: Counter[str] = Counter()
    for row in rows:
        prompts.add(row["prompt_id"])
        finish_reasons.update(row["finish_reasons"])
        total["rows"] += 1
        total["turns"] += len(row["turns"])
        total["answer_tokens"] += sum(end - start for start, end in row["turns"])
    reasons = Counter(error["reason"].partition(" (")[0] for error in errors)  # what is in brackets differs by row
    counted = {"prompts": len(prompts), **total, "finish_reasons": dict(finish_reasons)}
    return {**counted, "errors": dict(reasons)}


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _prompt_limit(context: int | None, max_new_tokens: int, max_prompt_tokens: int | None) -> int | None:
    if context is None:
        return max_prompt_tokens
    if max_new_tokens >= context:
        raise InputError(
            f"responses.max_new_tokens={max_new_tokens} leaves no room for a prompt in the target's context of "
            f"{context} tokens; choose less"
        )
    room = context - max_new_tokens
    return room if max_prompt_tokens is None else min(room, max_prompt_tokens)


def _check_settings(answers: str, on_length: str, **numbers: float) -> None:
    choices = {"answers": (answers, ("target", "imported")), "on_length": (on_length, ("keep", "drop"))}
    for key, (value, allowed) in choices.items():
        if value not in allowed:
            raise InputError(f"responses.{key}={value} is unknown; choose {' or '.join(allowed)}")
    for key, least in {
        "batch_size": 1,
        "batch_tokens": 1,
        "window": 1,
        "max_new_tokens": 1,
        "temperature": 0,
        "top_k": 0,
    }.items():
        if numbers[key] < least:
            raise InputError(f"responses.{key}={numbers[key]} must be {least} or more")
    if not 0 < numbers["top_p"] <= 1:
        raise InputError(f"responses.top_p={numbers['top_p']} must be over 0 and at most 1; 1 keeps all tokens")


def _batched(items: Iterable, size: int) -> Iterator[list]:
    items = iter(items)
    while batch := list(islice(items, size)):
        yield batch
