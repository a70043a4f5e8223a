"""One training step at the sizes that users have: tokens a second, memory, the share of the machine, what takes it.

    python benchmarks/train_step.py --out benchmarks/results/train_step.json [overrides of train.py]
    python benchmarks/train_step.py --out /tmp/rows.json --small          # tiny sizes, also on the CPU: does it run?

Random weights of Llama-3.1-8B's shape, or of --head's, K = 7, bf16 products over float32 masters, as `trainer=gpu`.
Forward and backward are timed; the optimizer step is timed apart, and its state is not in the memory figure. The plain
reference (kernels=plain) is timed too, in every case that it fits.
"""

import argparse
import gc
import logging
import statistics
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from random_head import HEADS, SMALL, RandomSamples, ragged_lengths, random_head
from result import write_result
from step_cost import kernel_group, matrix_product_ceiling, product_flops, time_by_kernel, timed
from torch._dynamo.utils import counters

from eagle3.compose import compose_run
from eagle3.head.batch import TttBatch
from eagle3.head.draft_head import HeadConfig
from eagle3.settings.training import TrainRun
from eagle3.target.facts import PLAIN
from eagle3.training.module import HeadTraining

WARM_UP, REPEATS, RAGGED_PACKS = 3, 10, 8
TOP_KERNELS = 40
SECONDS_A_PRODUCT = 0.3  # long enough for the clock to settle under load
# Null where the case does not fit.
MEASURED = ("tokens_per_s", "host_ms", "peak_gb", "tflops", "share_of_ceiling", "reference_tokens_per_s", "recompiles",
            "slowest_ragged_step")  # fmt: skip


@dataclass(frozen=True)
class Case:
    tokens: int
    documents: int
    answer_share: float

    @classmethod
    def parse(cls, text: str) -> "Case":
        """A case by its number in CASES, or as TOKENS,DOCUMENTS,ANSWER_SHARE."""
        if text.isdigit():
            return CASES[int(text)]
        tokens, documents, share = text.split(",")
        return cls(int(tokens), int(documents), float(share))


CASES = [
    Case(4096, 1, 1), Case(16384, 8, 1), Case(16384, 8, 0.5), Case(16384, 4, 0.1), Case(65536, 1, 0.02),
    Case(4096, 12, 0.7), Case(8192, 24, 0.7),  # packs of short conversations
]  # fmt: skip
SMALL_CASES = [Case(96, 1, 1), Case(128, 4, 0.5)]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--small", action="store_true", help="tiny sizes")
    parser.add_argument("--head", choices=HEADS, default="8b", help="of a target of that size")
    parser.add_argument(
        "--case", type=Case.parse, action="append", help="number of a case, from 0, or TOKENS,DOCUMENTS,ANSWER_SHARE; "
        "may be repeated",
    )  # fmt: skip
    parser.add_argument("--no-reference", action="store_true", help="do not time kernels=plain")
    parser.add_argument("--no-ragged", action="store_true", help="do not time packs that differ in their lengths")
    parser.add_argument("overrides", nargs="*", help="of train.py: kernels.*, ttt_steps=, optim=")
    options = parser.parse_intermixed_args(arguments)
    cases = options.case or (SMALL_CASES if options.small else CASES)
    shape = SMALL if options.small else HEADS[options.head]
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # which kernels were chosen, and why
    rows: list[dict[str, Any]] = []
    parts = {"with_reference": not options.no_reference, "with_ragged": not options.no_ragged}
    for row in measured(shape, cases, options.overrides, **parts):
        rows.append(row)
        write_result(options.out, {"rows": rows}, arguments)
        print(printed(row), flush=True)


def measured(
    shape: HeadConfig, cases: list[Case], overrides: list[str], *, with_reference: bool, with_ragged: bool
) -> Iterator[dict[str, Any]]:
    """A row for each case."""
    run = training_run(overrides)
    reference = training_run([*(each for each in overrides if not each.startswith("kernels")), "kernels=plain"])
    torch.set_float32_matmul_precision(run.matmul_precision)
    samples = RandomSamples(shape, torch.bfloat16, seed=0)
    tokens = max(case.tokens for case in cases)
    ceiling = matrix_product_ceiling(shape, min(16384, tokens), device(), 0.01 if shape is SMALL else SECONDS_A_PRODUCT)
    for case in cases:
        batch = samples.pack(
            [case.tokens // case.documents] * case.documents, case.answer_share, ttt_steps=run.ttt_steps
        ).to(device())
        row = {"hidden_size": shape.hidden_size} | asdict(case) | dict.fromkeys(MEASURED) | {"ceiling_tflops": ceiling}
        row |= without_overflow(lambda batch=batch: cost(random_step(shape, run), batch, ceiling))
        if with_ragged:
            row |= without_overflow(lambda case=case: ragged_cost(random_step(shape, run), case, samples))
        if with_reference:
            row |= without_overflow(
                lambda batch=batch: {"reference_tokens_per_s": random_step(shape, reference).tokens_per_s(batch)}
            )
        yield row


def training_run(overrides: list[str]) -> TrainRun:
    return compose_run("train", "trainer=gpu", "data.path=.", "run_dir=.", *overrides)


class Step:
    """What HeadTraining computes for a batch, under the trainer's precision but without Lightning around it."""

    def __init__(self, module: HeadTraining, run: TrainRun) -> None:
        self.module, self.precision = module.to(device()), run.trainer.keys["precision"]
        module.choose_kernels(device(), self.precision)

    def __call__(self, batch: TttBatch) -> None:
        self.module.zero_grad(set_to_none=True)
        half = self.precision == "bf16-mixed"
        with torch.autocast(device().type, torch.bfloat16) if half else nullcontext():
            loss, _ = self.module.compute_step(batch)
        loss.backward()

    def tokens_per_s(self, batch: TttBatch) -> float:
        for _ in range(WARM_UP):
            self(batch)
        return round(len(batch.pack.input_ids) / timed(lambda: self(batch), REPEATS, device()), 1)


def random_step(shape: HeadConfig, run: TrainRun) -> Step:
    torch.manual_seed(0)
    with device():
        target = torch.randn(shape.vocab_size, shape.hidden_size, dtype=torch.bfloat16)
        head = random_head(shape)
        head.lm_head.requires_grad_(run.model.keys["train_lm_head"])
        module = HeadTraining(
            head=head,
            loss=run.loss.build(),
            optim=run.optim.build(),
            ttt_steps=run.ttt_steps,
            kernels=run.kernels.build(),
            embedding=target,
            lm_head=target,
            logit_transform=PLAIN,
            origin={},
            settings={},
        )
    return Step(module, run)


def cost(step: Step, batch: TttBatch, ceiling: float) -> dict[str, Any]:
    """Rate, memory, share of the ceiling, the optimizer's time and where the rest goes."""
    if on_gpu():
        torch.cuda.reset_peak_memory_stats()
    step(batch)  # what is allocated once, and what compiling needs, is no part of a step
    # A CUDA graph allocates while it is recorded; its replays, in the same memory, do not show in the peak.
    if on_gpu() and not step.module.kernels.cuda_graphs:
        torch.cuda.reset_peak_memory_stats()
    rate = step.tokens_per_s(batch)
    peak_gb = torch.cuda.max_memory_allocated() / 1e9 if on_gpu() else None
    num_tokens, num_rows = len(batch.pack.input_ids), len(batch.anchors)
    seconds = num_tokens / rate
    shape = step.module.head.config
    flops = product_flops(
        shape, tokens=num_tokens, rows=num_rows, pairs=int(batch.anchor_steps.sum()),
        trains_lm_head=step.module.head.lm_head.weight.requires_grad,
    )  # fmt: skip
    kernels = time_by_kernel(lambda: step(batch), device())
    groups: dict[str, float] = defaultdict(float)
    for name, milliseconds in kernels:
        groups[kernel_group(name)] += milliseconds
    return {
        "trained_rows": num_rows,
        "tokens_per_s": rate,
        "host_ms": host_ms(lambda: step(batch)),
        "step_ms": 1000 * seconds,
        "peak_gb": peak_gb,
        "gflop_per_token": flops / num_tokens / 1e9,
        "tflops": flops / seconds / 1e12,
        "share_of_ceiling": flops / seconds / 1e12 / ceiling,
        "optimizer_ms": 1000 * optimizer_seconds(step),
        "ms_by_group": dict(groups),
        "top_kernels_ms": dict(kernels[:TOP_KERNELS]),
        "host_waits": dict(host_waits(lambda: step(batch))),
    }


def ragged_cost(step: Step, case: Case, samples: RandomSamples) -> dict[str, Any]:
    """Compilations and the slowest step over packs that differ in tokens, documents and lengths, after the first two.

    A kernel that compiles without torch.compile shows in the slowest step alone.
    """
    lengths = [
        ragged_lengths(case.tokens - 13 * seed, case.documents + seed % 3, seed=seed) for seed in range(RAGGED_PACKS)
    ]
    packs = (samples.pack(each, case.answer_share, ttt_steps=step.module.ttt_steps).to(device()) for each in lengths)
    seconds, graphs = [], []
    for batch in packs:
        seconds.append(timed(lambda batch=batch: step(batch), 1, device()))
        graphs.append(counters["stats"]["unique_graphs"])
    later = seconds[2:]
    return {
        "recompiles": graphs[-1] - graphs[1],
        "slowest_ragged_step": round(max(later) / statistics.median(later), 2),
    }


def optimizer_seconds(step: Step) -> float:
    """Of clipping and the optimizer, with the gradients of the last step."""
    head = step.module.head
    optimizer, _ = step.module.optim.build(head, 1, by_graph=step.module.kernels.cuda_graphs)

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()

    for _ in range(2):  # allocates, then records
        update()
    return timed(update, REPEATS, device())


def host_ms(work: Callable[[], object]) -> float:
    """Milliseconds until the host has launched all of a call, on an idle GPU."""
    spent = []
    for _ in range(REPEATS):
        if on_gpu():
            torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        spent.append(time.perf_counter() - started)
    return 1000 * statistics.median(spent)


def host_waits(work: Callable[[], object]) -> Counter[str]:
    """Where a call makes the host wait for the GPU: file and line, how often."""
    if not on_gpu():
        return Counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [each for each in caught if "called a synchronizing" in str(each.message)]
    return Counter(f"{Path(each.filename).name}:{each.lineno}" for each in waits)


def without_overflow(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result, or nothing where the GPU's memory is too small."""
    try:
        return work()
    except torch.OutOfMemoryError:
        return {}
    finally:
        gc.collect()
        if on_gpu():
            torch.cuda.empty_cache()


def on_gpu() -> bool:
    return torch.cuda.is_available()


def device() -> torch.device:
    return torch.device("cuda" if on_gpu() else "cpu")


def printed(row: dict[str, Any]) -> str:
    name = f"{row['tokens']} tokens, {row['documents']} documents, answers {row['answer_share']:.0%}"
    if "ms_by_group" not in row:
        return f"{name} do not fit into this GPU's memory"
    waits = sum(row["host_waits"].values())
    recompiled = "" if row["recompiles"] is None else f", {row['recompiles']} recompilations"
    groups = ", ".join(f"{group} {spent:.1f}" for group, spent in row["ms_by_group"].items())
    return (
        f"{name}: {row['tokens_per_s']:,.0f} tokens/s, {row['share_of_ceiling']:.0%} of the ceiling, "
        f"{row['step_ms']:.1f} ms a step ({groups}), {row['host_ms']:.1f} ms of the host, "
        f"optimizer {row['optimizer_ms']:.1f} ms, {waits} host waits{recompiled}"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
