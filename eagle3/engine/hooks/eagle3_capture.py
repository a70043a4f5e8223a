"""Forward hooks that an SGLang server runs in its scheduler: the hidden states of prompts, into files that others read.

SGLang imports this file by its name (--forward-hooks, and PYTHONPATH names this folder), in its own environment: it
needs PyTorch and safetensors, and of this project the file beside it. One file a forward batch, with the rows of all
requests whose id is one of ours; a request that prefill cuts is in several. Nothing is lost when the readers
are slow: then the server waits.

Shapes: N rows of a batch that are ours, A captured layers, H hidden size, J rows with a teacher, V vocabulary.
"""

import json
import os
import queue
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path

import eagle3_fp8
import torch
from safetensors.torch import save_file

MARK = "eagle3:"  # ids of requests that are captured: eagle3:NAME:BEGIN-END,BEGIN-END…, the positions with a teacher
FAILED = "failed.txt"  # why there will be no more files
WAITING = 4  # batches on the host that no file holds yet
POLL_S = 0.01
CHUNK = 2048  # rows of a product with the lm_head

_batch: dict = {}  # slot → the residual stream behind a layer, of the forward that runs


def layer(config: dict):
    """Return the hook of one captured layer: keeps what goes into the next one."""

    def keep(module, args, output):
        hidden, residual = (*output, None)[:2] if isinstance(output, tuple) else (output, None)
        if getattr(hidden, "_sglang_needs_allreduce_fusion", False):
            raise RuntimeError("an all-reduce is fused into the next layer: each GPU holds a part of the states")
        if torch.is_tensor(hidden) and hidden.ndim == 2:
            _batch[config["slot"]] = hidden if residual is None else hidden + residual

    return _unless_failed(config, keep)


def logits(config: dict):
    """Return the hook of the logits processor, which sees the last hidden state, the lm_head and whose rows it is."""
    writer = Writer(config)

    def capture(module, args, output):
        _, last, lm_head, batch = args[:4]
        slots = [_batch.pop(slot, None) for slot in range(config["slots"])]
        _batch.clear()
        ids = getattr(batch, "rids", None) or []
        if not batch.forward_mode.is_extend() or not any(rid.startswith(MARK) for rid in ids):
            return
        lengths, before = [*batch.extend_seq_lens_cpu], [*batch.extend_prefix_lens_cpu]
        if any(slot is None or len(slot) < sum(lengths) for slot in (*slots, last)):
            raise RuntimeError("a captured layer did not see all rows of the batch")
        parts, rows, with_teacher, at = [], [], [], 0
        for rid, length, start in zip(ids, lengths, before, strict=True):
            if rid.startswith(MARK):
                positions = teachers_in(rid, start, start + length)
                parts.append({"id": rid, "start": start, "rows": length, "teachers": len(positions)})
                rows += range(at, at + length)
                with_teacher += [at + position - start for position in positions]
            at += length
        rows, with_teacher = (torch.tensor(each, device=last.device, dtype=torch.long) for each in (rows, with_teacher))
        taught = last[with_teacher]
        argmax = teacher_argmax(taught, lm_head)
        if writer.writes:
            states = {"aux": torch.cat([slot[rows] for slot in slots], dim=-1), "last": taught}
            writer.put({**stored(states, config), "teacher_argmax": argmax.int()}, parts)

    return _unless_failed(config, capture)


def teachers_in(rid: str, begin: int, end: int) -> list[int]:
    """Return the positions with a teacher among [begin, end) of a request."""
    spans = (span.split("-") for span in rid.split(":")[2].split(",") if span)
    return [place for first, last in spans for place in range(max(begin, int(first)), min(end, int(last)))]


def teacher_argmax(taught, lm_head):
    """Return the argmax of each row (J, H) over the whole vocabulary, of which each GPU may hold a part."""
    shard = getattr(lm_head, "shard_indices", None)
    size = shard.num_org_elements if shard is not None else len(lm_head.weight)
    first = shard.org_vocab_start_index if shard is not None else 0
    best, place = taught.new_empty(len(taught), dtype=torch.float32), taught.new_empty(len(taught), dtype=torch.long)
    for begin in range(0, len(taught), CHUNK):
        chunk = taught[begin : begin + CHUNK]
        part = torch.nn.functional.linear(chunk.to(lm_head.weight.dtype), lm_head.weight[:size]).float()
        best[begin : begin + CHUNK], place[begin : begin + CHUNK] = part.max(dim=-1)
    group = _gpus_of_the_vocabulary(lm_head)
    if group is None:
        return place + first
    candidates = torch.stack([best.double(), (place + first).double()])
    everywhere = [torch.empty_like(candidates) for _ in range(group.size())]
    torch.distributed.all_gather(everywhere, candidates, group=group)
    values, places = torch.stack(everywhere).unbind(1)  # (GPUs, J)
    return places.gather(0, values.argmax(0, keepdim=True))[0].long()


def stored(states: dict, config: dict) -> dict:
    """Return rows as the store keeps them, and whether all are finite: here, as the GPU has the time for it."""
    if config["dtype"] != "fp8":
        rows = {name: each.to(getattr(torch, config["dtype"])) for name, each in states.items()}
        return {**rows, "finite": torch.stack([each.isfinite().all() for each in rows.values()]).all()}
    tensors = {"finite": torch.stack([each.isfinite().all() for each in states.values()]).all()}
    for name, layers in (("aux", config["slots"]), ("last", 1)):
        tensors[name], tensors[f"{name}_exponents"] = eagle3_fp8.packed(states[name], layers)
    return tensors


def _gpus_of_the_vocabulary(lm_head):
    """Return the group over which the lm_head is cut, None where one GPU holds it whole."""
    if getattr(lm_head, "tp_size", 1) == 1:
        return None
    from sglang.srt.distributed import get_tp_group

    return get_tp_group().device_group


class Writer:
    """Copies batches to the host beside the computation, and writes them in threads of its own."""

    def __init__(self, config: dict) -> None:
        self.config, self.folder = config, Path(config["folder"])
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        self.writes = rank == 0  # the others hold the same rows
        self.number = 0
        self.waiting: queue.Queue = queue.Queue(maxsize=WAITING)
        self.stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        if self.writes:
            for _ in range(2):
                threading.Thread(target=self._write_all, daemon=True).start()

    def put(self, tensors, parts) -> None:
        self.number += 1
        self.waiting.put((self.number, *self._on_host(tensors), parts))

    def _on_host(self, tensors: dict):
        if self.stream is None:
            return {name: tensor.contiguous().clone() for name, tensor in tensors.items()}, None
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            host = {}
            for name, tensor in tensors.items():
                tensor.record_stream(self.stream)
                host[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                host[name].copy_(tensor, non_blocking=True)
            return host, self.stream.record_event()

    def _write_all(self) -> None:
        while True:
            number, tensors, copied, parts = self.waiting.get()
            try:
                if copied is not None:
                    copied.synchronize()
                while _size(self.folder) > self.config["most_bytes"]:  # the readers are slower
                    time.sleep(POLL_S)
                path = self.folder / f"{number:08d}.safetensors"
                save_file(tensors, f"{path}.tmp", metadata={"parts": json.dumps(parts)})
                os.replace(f"{path}.tmp", path)
            except Exception as error:
                _fail(self.config, f"{type(error).__name__}: {error}")


def _size(folder: Path) -> int:
    size = 0
    for entry in os.scandir(folder):
        with suppress(FileNotFoundError):  # read meanwhile
            size += entry.stat().st_size
    return size


def _fail(config: dict, reason: str) -> None:
    Path(config["folder"], FAILED).write_text(reason)


def _unless_failed(config: dict, hook):
    """A hook that fails says so in a file: an exception would end the server with a stack of its own."""

    def run(module, args, output):
        try:
            hook(module, args, output)
        except Exception as error:
            traceback.print_exc()
            _fail(config, f"{type(error).__name__}: {error}")

    return run
