"""The forward hook that captures hidden states inside an SGLang server (0.5.23 and later) and writes them to files.

SGLang imports this file by name: --forward-hooks names it, and PYTHONPATH holds this folder. It runs in SGLang's
environment, so it needs only PyTorch, safetensors and eagle3_fp8.py. Each forward batch gives one file in the folder of
each client that has requests in it; a request that prefill cuts into chunks is in several files. If they are read too
slowly, the server waits: no rows are lost.

Shapes: N rows of a batch, A captured layers, H hidden size, AH = A · H, J rows with a teacher, V vocabulary.
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

# Ids of captured requests: eagle3:CLIENT.NUMBER:BEGIN-END,BEGIN-END…, the spans of positions with a teacher.
MARK = "eagle3:"
FAILED = "failed.txt"  # holds the reason why there will be no more files
WAITING = 4  # batches on the host that wait to be written
POLL_S = 0.01
CHUNK = 2048  # rows of one product with the lm_head


def logits(config: dict):
    """Return the hook of the logits processor: it gets the captured states, the last hidden state and the lm_head."""
    writer = Writer(config)

    def capture(module, args, output):
        _, last, lm_head, batch, aux = (*args, None)[:5]
        write_rows(writer, aux if isinstance(aux, (list, tuple)) else [aux], last, lm_head, batch)

    return unless_failed(config, capture)


def write_rows(writer, aux: list, last, lm_head, batch) -> None:
    """Write the rows of our requests, if the batch is a prefill with some.

    `aux` holds the states of the captured layers, low to high, in one tensor or more: (N, AH) side by side."""
    ids = getattr(batch, "rids", None) or []
    if not batch.forward_mode.is_extend() or not any(rid.startswith(MARK) for rid in ids):
        return
    # The lengths may continue after the last request: SGLang pads some batches with dummies.
    lengths, before = ([*each][: len(ids)] for each in (batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu))
    if any(states is None or len(states) < sum(lengths) for states in (*aux, last)):
        raise RuntimeError("a captured layer did not see all rows of the batch")
    if (width := sum(states.shape[-1] for states in aux)) != writer.config["slots"] * last.shape[-1]:
        raise RuntimeError(f"the captured states are {width} wide, not those of {writer.config['slots']} layers")
    of_clients: dict[str, tuple[list[dict], list[int], list[int]]] = {}
    at = 0
    for rid, length, start in zip(ids, lengths, before, strict=True):
        if rid.startswith(MARK):
            client = rid[len(MARK) :].partition(".")[0]
            parts, places, taught_at = of_clients.setdefault(client, ([], [], []))
            positions = teachers_in(rid, start, start + length)
            parts.append({"id": rid, "start": start, "rows": length, "teachers": len(positions)})
            places += range(at, at + length)
            taught_at += [at + position - start for position in positions]
        at += length
    for client, (parts, places, taught_at) in of_clients.items():
        rows, with_teacher = (torch.tensor(each, device=last.device, dtype=torch.long) for each in (places, taught_at))
        taught = last[with_teacher]
        argmax = teacher_argmax(taught, lm_head)
        if writer.writes:
            states = {"aux": torch.cat([each[rows] for each in aux], dim=-1), "last": taught}
            writer.put(client, {**stored(states, writer.config), "teacher_argmax": argmax.int()}, parts)


def teachers_in(rid: str, begin: int, end: int) -> list[int]:
    """Return the positions with a teacher among [begin, end) of a request."""
    spans = (span.split("-") for span in rid.split(":")[2].split(",") if span)
    return [place for first, last in spans for place in range(max(begin, int(first)), min(end, int(last)))]


def teacher_argmax(taught, lm_head):
    """Return the argmax of each row (J, H) over the whole vocabulary; each GPU may hold a part of it."""
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
    """Return rows as the store keeps them, and whether all are finite: checked here, where the GPU has time for it."""
    if config["dtype"] != "fp8":
        rows = {name: each.to(getattr(torch, config["dtype"])) for name, each in states.items()}
        return {**rows, "finite": torch.stack([each.isfinite().all() for each in rows.values()]).all()}
    tensors = {"finite": torch.stack([each.isfinite().all() for each in states.values()]).all()}
    for name, layers in (("aux", config["slots"]), ("last", 1)):
        tensors[name], tensors[f"{name}_exponents"] = eagle3_fp8.packed(states[name], layers)
    return tensors


def _gpus_of_the_vocabulary(lm_head):
    """Return the process group that shares the lm_head, None if every GPU holds all of it."""
    if getattr(lm_head, "tp_size", 1) == 1:
        return None
    from sglang.srt.distributed import get_tp_group

    return get_tp_group().device_group


class Writer:
    """Copies batches to the host while the GPU computes, and writes them in its own threads."""

    def __init__(self, config: dict) -> None:
        self.config, self.folder = config, Path(config["folder"])
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        self.writes = rank == 0  # the other ranks have the same rows
        self.number = 0
        self.waiting: queue.Queue = queue.Queue(maxsize=WAITING)
        self.stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        if self.writes:
            for _ in range(2):
                threading.Thread(target=self._write_all, daemon=True).start()

    def put(self, client: str, tensors, parts) -> None:
        self.number += 1
        self.waiting.put((self.number, client, *self._on_host(tensors), parts))

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
            number, client, tensors, copied, parts = self.waiting.get()
            try:
                if copied is not None:
                    copied.synchronize()
                while _size(self.folder) > self.config["most_bytes"]:  # the reader is slower
                    time.sleep(POLL_S)
                path = self.folder / f"{number:08d}.tmp"
                save_file(tensors, path, metadata={"parts": json.dumps(parts)})
                try:
                    path.replace(self.folder / client / f"{number:08d}.safetensors")
                except FileNotFoundError:  # its process has ended
                    path.unlink()
            except Exception as error:
                _fail(self.config, f"{type(error).__name__}: {error}")


def _size(folder: Path) -> int:
    size = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # the reader has just deleted it
                size += os.path.getsize(os.path.join(place, name))
    return size


def _fail(config: dict, reason: str) -> None:
    Path(config["folder"], FAILED).write_text(reason)


def unless_failed(config: dict, hook):
    """Let a hook that fails report it in a file: an exception would end the server with an unrelated traceback."""

    def run(module, args, output):
        try:
            hook(module, args, output)
        except Exception as error:
            traceback.print_exc()
            _fail(config, f"{type(error).__name__}: {error}")

    return run
