"""Serves a head with vLLM and llama.cpp on a CPU, and compares both with our own decoder: make outside-servers

    python benchmarks/peers/outside_servers.py --target TARGET --head HEAD --prompts HELD_OUT.jsonl --out FILE

exports the head in float32 and answers held-out prompts greedily with every server that can serve it.
Each answer must be the target's own, and the accept length within 1 % of our decoder's, counted as the server counts.
Without arguments it takes the head of `make quickstart` on the bundled target. `make outside-servers` installs the
servers in build/outside.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from socket import socket
from typing import Any
from urllib.request import urlopen

import torch
from quickstart import HELD_OUT, IN_FLOAT32, TARGET
from result import ROOT, write_result

from eagle3.decoding.speculate import Round, Speculator, plain_greedy
from eagle3.engine.client import LONGEST_REPLY, ask_now, responds
from eagle3.head_files.files import read_files
from eagle3.head_files.format import LoadedHead, load_head, save_head
from eagle3.head_files.servers import LLAMA_CPP, VLLM, obstacles
from eagle3.notebook import open_target, read_prompts
from eagle3.target.model import Target

OUTSIDE = ROOT / "build" / "outside"
MAX_DIFFERENCE = 0.01
STEPS = {VLLM: (3,), LLAMA_CPP: (3, 7)}


@dataclass(frozen=True)
class Workload:
    """Prompts and the target's own greedy answers to them, as token ids; and where target and servers are."""

    target: Target
    prompts: list[list[int]]
    answers: list[list[int]]
    options: argparse.Namespace

    @property
    def max_length(self) -> int:
        return max(map(len, self.prompts)) + self.options.max_new_tokens + 16


@dataclass(frozen=True)
class Counts:
    """Verifications, and the drafts that they accepted."""

    verifications: int
    accepted: int

    @property
    def accept_length(self) -> float:
        return 1 + self.accepted / self.verifications


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=TARGET)
    parser.add_argument("--head", type=Path, default=ROOT / "outputs/quickstart/head")
    parser.add_argument("--prompts", type=Path, default=HELD_OUT)
    parser.add_argument("--servers", nargs="+", choices=[*STEPS], default=[*STEPS])
    parser.add_argument("--limit", type=int, default=40, help="prompts to answer")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--vllm", type=Path, default=OUTSIDE / "vllm/bin/python", help="a Python that has vLLM")
    parser.add_argument("--llama-cpp", type=Path, default=OUTSIDE / "llama.cpp", help="a built source tree")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs/outside_servers.json")
    work = workload(parser.parse_args())
    rows = [*compared(work)]
    write_result(work.options.out, {"prompts": len(work.prompts), "rows": rows})
    print(table(rows, len(work.prompts)))
    if not all(row.get("passed", True) for row in rows):
        sys.exit("a server answers or accepts otherwise than our decoder: see the table")


def workload(options: argparse.Namespace) -> Workload:
    torch.set_num_threads(1)
    target, longest = open_target(str(options.target), *IN_FLOAT32), options.max_new_tokens
    given = {"limit": options.limit, "max_new_tokens": longest}
    prompts = read_prompts(target, options.prompts, "prompts.turns=first", **given).prompts
    return Workload(target, prompts, [plain_greedy(target, each, longest) for each in prompts], options)


def compared(work: Workload) -> Iterator[dict[str, Any]]:
    """Yield a row for each server and number of steps, or one with the reason why a server cannot serve the head."""
    head = load_head(work.options.head, num_layers=len(work.target.layers), dtype=torch.float32)
    needed = {steps for server in work.options.servers for steps in STEPS[server]}
    ours = {steps: accepted_drafts(work, head, steps) for steps in sorted(needed)}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "head"
        folder.mkdir()
        save_head(folder, head.head, head.capture_layers, "float32")
        for server, reasons in obstacles(read_files(folder)).items():
            if server not in work.options.servers:
                continue
            if reasons:
                yield {"server": server, "cannot": ", ".join(reasons)}
                continue
            for steps in STEPS[server]:
                yield {"server": server, "steps": steps} | row(work, server, folder, ours, steps)


def row(work: Workload, server: str, head: Path, ours: dict[int, list[list[int]]], steps: int) -> dict[str, Any]:
    started = time.perf_counter()
    version, answers, theirs = (by_vllm if server == VLLM else by_llama_cpp)(work, head, steps)
    expected = counted_as(server, ours[steps], [*map(len, work.answers)], work.options.max_new_tokens, steps)
    lossless = sum(given == own for given, own in zip(answers, work.answers, strict=True))
    difference = abs(theirs.accept_length / expected.accept_length - 1)
    return {
        "version": version,
        "ours": round(expected.accept_length, 4),
        "theirs": round(theirs.accept_length, 4),
        "lossless": lossless,
        "passed": lossless == len(work.answers) and difference <= MAX_DIFFERENCE,
        "seconds": round(time.perf_counter() - started, 1),
    }


def table(rows: list[dict[str, Any]], prompts: int) -> str:
    lines = [f"{'server':<10} steps    ours  theirs  lossless"]
    for row in rows:
        name = f"{row['server']:<10}"
        if "cannot" in row:
            lines.append(f"{name} cannot: {row['cannot']}")
        else:
            numbers = f"{row['steps']:>5} {row['ours']:>7.4f} {row['theirs']:>7.4f}  {row['lossless']:>3} of {prompts}"
            lines.append(f"{name} {numbers}{'' if row['passed'] else '  FAILED'}")
    return "\n".join(lines)


# --- our decoder -----------------------------------------------------------------------------------------------------


def accepted_drafts(work: Workload, head: LoadedHead, steps: int) -> list[list[int]]:
    """Return for each answer how many drafts each verification accepted."""
    speculator, accepted = Speculator(work.target, head.head, head.capture_layers), []
    for prompt, answer in zip(work.prompts, work.answers, strict=True):
        rounds: list[Round] = []
        made = speculator.decode(prompt, steps=steps, max_new_tokens=work.options.max_new_tokens, watch=rounds.append)
        assert made.token_ids == answer
        accepted.append([len(each.chosen) - 1 for each in rounds])
    return accepted


def counted_as(server: str, accepted: list[list[int]], lengths: list[int], max_new_tokens: int, steps: int) -> Counts:
    """Count our verifications of answers of these lengths as the server does.

    vLLM drafts beyond `max_new_tokens` and counts drafts that it accepts behind an answer's end, as our decoder does.
    llama.cpp does neither, drafts one token less than are left to generate, and does not count a forward without
    drafts."""
    if server == LLAMA_CPP:
        both = zip(accepted, lengths, strict=True)
        accepted = [[*_within(each, length, max_new_tokens, steps)] for each, length in both]
    return Counts(sum(map(len, accepted)), sum(map(sum, accepted)))


def _within(accepted: list[int], length: int, max_new_tokens: int, steps: int) -> Iterator[int]:
    made = 1  # by the prefill
    for count in accepted:
        if (drafts := min(steps, max_new_tokens - made - 1)) > 0:
            yield min(count, drafts, length - made - 1)
        made += count + 1


# --- the servers: version, answers, counts ---------------------------------------------------------------------------


def by_vllm(work: Workload, head: Path, steps: int) -> tuple[str, list[list[int]], Counts]:
    asked = {
        "target": str(work.options.target.resolve()),
        "head": str(head),
        "steps": steps,
        "prompts": work.prompts,
        "max_new_tokens": work.options.max_new_tokens,
        "max_length": work.max_length,
        "stop_ids": sorted(work.target.stop_ids),
    }
    request, answered = head.with_suffix(".request.json"), head.with_suffix(".answers.json")
    request.write_text(json.dumps(asked))
    run(work.options.vllm, ROOT / "benchmarks/peers/outside_vllm.py", request, answered)
    found = json.loads(answered.read_text())
    return f"vllm {found['version']}", found["answers"], Counts(found["verifications"], found["accepted"])


def by_llama_cpp(work: Workload, head: Path, steps: int) -> tuple[str, list[list[int]], Counts]:
    tree, target, gguf = work.options.llama_cpp, work.options.target.resolve(), head.with_suffix(".gguf")
    convert = (work.options.vllm, ROOT / "benchmarks/peers/outside_gguf.py", tree)  # vLLM's Python has what it imports
    if not (target_gguf := head.parent / "target.gguf").exists():
        run(*convert, target, target_gguf)
    if not gguf.exists():
        run(*convert, head, gguf, "--target-model-dir", target)
    flags = f"-m {target_gguf} -md {gguf} --spec-type draft-eagle3 --spec-draft-n-max {steps} --spec-draft-n-min 0 "
    flags += f"--spec-draft-p-min 0 -np 1 -t 1 -c {work.max_length} --metrics"
    with served([str(tree / "build/bin/llama-server"), *flags.split()]) as url:
        answers = [completion(url, prompt, work) for prompt in work.prompts]
        version = ask_now(f"{url}/props")["build_info"]
        counters = urlopen(f"{url}/metrics", timeout=30).read(LONGEST_REPLY)
        metrics = dict(re.findall(r"^llamacpp:(\w+) (\d+)", counters.decode(), re.MULTILINE))
    names = ("spec_decode_num_drafts_total", "spec_decode_num_accepted_tokens_total")
    return f"llama.cpp {version}", answers, Counts(*(int(metrics[name]) for name in names))


def completion(url: str, prompt: list[int], work: Workload) -> list[int]:
    asked = {"prompt": prompt, "n_predict": work.options.max_new_tokens, "temperature": 0, "cache_prompt": False}
    return ask_now(f"{url}/completion", asked | {"return_tokens": True}, timeout_s=600)["tokens"]


@contextmanager
def served(command: list[str]) -> Iterator[str]:
    """Run a llama-server until the block ends; yield its address."""
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([*command, "--port", str(port)], stdout=log, stderr=log)
        try:
            while not responds(f"{url}/health", timeout_s=5):
                if process.poll() is not None:
                    log.seek(0)
                    sys.exit(f"llama-server ended:\n{log.read().decode()[-2000:]}")
                time.sleep(0.2)
            yield url
        finally:
            process.kill()
            process.wait()


def run(*command: Any) -> None:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")


if __name__ == "__main__":
    main()
