"""Cost of the prompts stage: rows per second of each part on one core, and time, memory and disk for a number of rows.

python benchmarks/prompts.py                                  # minutes; writes benchmarks/results/prompts.json
python benchmarks/prompts.py --rows 100000,1000000 --prompts FILE.jsonl

Rows are generated: words of the bundled prompts in random order, a tenth of them near copies of an earlier row, so that
duplicates are found and compared. Each size runs in a process of its own, and the peak of its memory is read from it.
"""

import argparse
import json
import multiprocessing
import os
import random
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

from result import ROOT, write_result

from eagle3.compose import compose_run
from eagle3.prompts import Prompt, read_prompts, source_at
from eagle3.prompts.rules import Rules
from eagle3.prompts.stage import prepare_prompts
from eagle3.settings.precomputing import PrecomputeRun
from eagle3.storage.files import write_jsonl

BUNDLED = ROOT / "tests" / "assets" / "prompts"
NEAR_COPIES = 0.1  # of the generated rows
REMEMBERED = 1000  # earlier rows that a near copy is made from


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "prompts.json")
    parser.add_argument("--prompts", type=Path, default=BUNDLED / "train.jsonl", help="for the rates of the checks")
    parser.add_argument("--rows", default="100000,400000,1600000", help="sizes for the memory")
    parser.add_argument("--privacy", default="off", help="the check that the sizes run with: off or patterns")
    options = parser.parse_args()
    result: dict[str, Any] = {"rates_one_core": rates(options.prompts), "sizes": []}
    for rows in map(int, options.rows.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rows.jsonl"
            write_jsonl(path, generated(rows))
            result["sizes"].append(in_fresh_process(whole_stage, path, Path(folder) / "out", rows, options.privacy))
        print(json.dumps(result["sizes"][-1]), flush=True)
    write_result(options.out, result)
    print(json.dumps({key: value for key, value in result.items() if key != "sizes"}, indent=1))


def in_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function in a process of its own, so that the peak of memory is that of this call."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def rules(*, privacy: str) -> Rules:
    """Return the stage's rules, with one benchmark for leaks."""
    run: PrecomputeRun = compose_run(
        "precompute", f"prompts/privacy='{privacy}'", f"prompts.decontamination.benchmarks=[{BUNDLED}/heldout.jsonl]",
        "prompts.path=.", "target.path=.", "out_dir=.",
    )  # fmt: skip
    return Rules(run.prompts, privacy=run.prompts.privacy.build())


def rates(path: Path) -> dict[str, Any]:
    """Prompts per second of one core: reading, each check, and the signature, one after the other."""
    source = source_at("prompts", str(path))
    started = time.process_time()
    found = [prompt for _, prompt in read_prompts(source)]
    prompts = [prompt for prompt in found if isinstance(prompt, Prompt)]
    measured = {"reading": len(found) / (time.process_time() - started)}
    made = rules(privacy="patterns")
    parts: dict[str, Callable[[Prompt], Any]] = {check.name: check for check in made.checks(source)}
    for name, part in {**parts, "signature": made.signer}.items():
        part(prompts[0])  # loads what it loads once
        started = time.process_time()
        for prompt in prompts:
            part(prompt)
        measured[name] = len(prompts) / (time.process_time() - started)
    characters = sum(len(message["content"]) for prompt in prompts for message in prompt.messages)
    return {
        "prompts": len(prompts),
        "characters_a_prompt": round(characters / len(prompts), 1),
        **{name: round(rate) for name, rate in measured.items()},
    }


def generated(count: int) -> Iterator[dict]:
    rng = random.Random(0)
    text = (BUNDLED / "heldout.jsonl").read_text()
    vocabulary = sorted({word for word in text.split() if word.isalpha()})
    recent: list[list[str]] = []
    for number in range(count):
        if recent and rng.random() < NEAR_COPIES:
            words = list(rng.choice(recent))
            words[rng.randrange(len(words))] = rng.choice(vocabulary)
        else:
            words = rng.choices(vocabulary, k=rng.randint(5, 100))
        recent = [*recent[-REMEMBERED:], words] if number % 7 == 0 else recent
        yield {"id": number, "license": "MIT", "messages": [{"role": "user", "content": " ".join(words)}]}


def whole_stage(path: Path, out: Path, rows: int, privacy: str) -> dict[str, Any]:
    """Run the stage with two processes, by default without the privacy check, which takes most of the time.

    Peaks are of this process and of its largest worker. `own` leaves out mapped pages of files, which the system
    takes back when it needs memory.
    """
    made = rules(privacy=privacy)
    before, own = peak_mb(resource.RUSAGE_SELF), Peak(anonymous_mb)
    scratch = Peak(lambda: folder_mb(out / "prompts" / ".work"), seconds=1)
    started, cpu = time.perf_counter(), cpu_seconds()
    ledger = prepare_prompts(replace(made.settings, path=str(path), processes=2), made, keep_answers=False, out_dir=out)
    seconds = time.perf_counter() - started
    return {
        "rows": rows,
        "privacy": privacy,
        "prompts": ledger["prompts"],
        "bytes": path.stat().st_size,
        "seconds": round(seconds, 1),
        "rows_per_second": round(rows / seconds),
        "cpu_seconds": round(cpu_seconds() - cpu, 1),  # of all processes; the clock also counts what others run
        "start_mb": before,
        "own_peak_mb": own.stop(),
        "peak_mb": peak_mb(resource.RUSAGE_SELF),
        "worker_peak_mb": peak_mb(resource.RUSAGE_CHILDREN),
        "scratch_mb": scratch.stop(),
    }


class Peak:
    """The largest value of `measure`, in MB, sampled every few `seconds` until `stop`."""

    def __init__(self, measure: Callable[[], float], seconds: float = 0.05) -> None:
        self.measure, self.seconds = measure, seconds
        self.most = self.first = measure()
        self.done = Event()
        self.thread = Thread(target=self._watch)
        self.thread.start()

    def _watch(self) -> None:
        while not self.done.wait(self.seconds):
            self.most = max(self.most, self.measure())

    def stop(self) -> float:
        self.done.set()
        self.thread.join()
        return round(self.most, 1)


def anonymous_mb() -> float:
    """RssAnon of this process (Linux)."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in line]
    return int(line.split()[1]) * 1024 / 1e6


def folder_mb(folder: Path) -> float:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # the stage removes what it has used
                total += os.stat(Path(parent) / name).st_size
    return total / 1e6


def cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def peak_mb(who: int) -> float:
    return round(resource.getrusage(who).ru_maxrss * 1024 / 1e6, 1)  # on Linux


if __name__ == "__main__":
    main()
