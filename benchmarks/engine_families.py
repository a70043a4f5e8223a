"""Features captured in SGLang beside Hugging Face's, for families of targets that the hooks see from different sides.

    python benchmarks/engine_families.py --work DIR --out benchmarks/results/engine_families.json \
        --launch '{"python": "/path/to/sglang/venv/bin/python", "mem_fraction_static": 0.3}'   # 6 minutes of one GPU

Small targets with random weights; conversations whose answers are given. By the real commands: what each start of
features=sglang says of its sentinels, then the stores held against each other row by row. Where Hugging Face cannot
load a target (its quantised weights want kernels from the hub), the engine's own logits are the only judge.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import transformers
from feature_ways import differences
from result import write_result
from safetensors.torch import load_file, save_file
from time_to_head import as_override
from torch import Tensor

from eagle3.storage.files import read_json, write_json

ROOT = Path(__file__).resolve().parents[1]
TOKENIZER = ROOT / "tests/assets/tiny"
SHAPE = {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096, "initializer_range": 0.08,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip
WINDOW = {"sliding_window": 64, "query_pre_attn_scalar": 64}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 128}
LATENT = {"kv_lora_rank": 512, "q_lora_rank": 128, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
# With larger weights, one forward in bf16 is a third away from the same in float32.
GPT_OSS = {"sliding_window": 64, "num_local_experts": 8, "num_experts_per_tok": 2, "swiglu_limit": 7.0,
           "initializer_range": 0.02}  # fmt: skip
BLOCK = 128  # rows and columns that share a scale
VISION = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2,
          "patch_size": 14, "image_size": 28, "vision_use_head": False}  # fmt: skip


def fp8_blocks(weights: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Quantise projections as DeepSeek-V3 and Qwen3-FP8 are published: e4m3 with a scale for each block."""
    made = {}
    for name, weight in weights.items():
        if not name.endswith("_proj.weight"):
            made[name] = weight
            continue
        rows, columns = weight.shape
        blocks = weight.float().view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
        scale = blocks.abs().amax(dim=(1, 3)) / torch.finfo(torch.float8_e4m3fn).max
        made[name] = (blocks / scale[:, None, :, None]).view(rows, columns).to(torch.float8_e4m3fn)
        made[f"{name}_scale_inv"] = scale
    return made, {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]
    }  # fmt: skip


def mxfp4(weights: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Draw experts as gpt-oss is published: two values of four bits a byte, a power of two for each 32."""
    made, drawn = {}, torch.Generator().manual_seed(1)
    for name, weight in weights.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            made[name] = weight
            continue
        experts, inner, outer = weight.shape
        shape = (experts, outer, inner // 32)
        made[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=drawn)
        made[f"{name}_scales"] = torch.randint(117, 121, shape, dtype=torch.uint8, generator=drawn)
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return made, {"quant_method": "mxfp4", "modules_to_not_convert": kept}


# Family → name of its config class, what differs from SHAPE, and how its weights are quantised.
Quantise = Callable[[dict[str, Tensor]], tuple[dict[str, Tensor], dict[str, Any]]]
FAMILIES: dict[str, tuple[str, dict[str, Any], Quantise | None]] = {
    "llama": ("LlamaConfig", {}, None),
    "qwen3_moe": ("Qwen3MoeConfig", {**EXPERTS, "num_experts": 8}, None),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **EXPERTS, **LATENT, "num_attention_heads": 16, "num_key_value_heads": 16, "n_routed_experts": 8,
            "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1,
            "topk_method": "noaux_tc", "scoring_func": "sigmoid",
        },
        None,
    ),
    "gemma3_text": ("Gemma3TextConfig", {**WINDOW, "tie_word_embeddings": True}, None),
    "gemma3": ("Gemma3Config", {**WINDOW, "tie_word_embeddings": True, "vocab_size": 4160}, None),
    "qwen3_fp8": ("Qwen3Config", {}, fp8_blocks),
    "gpt_oss": ("GptOssConfig", GPT_OSS, None),
    "gpt_oss_mxfp4": ("GptOssConfig", GPT_OSS, mxfp4),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--families", nargs="*", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--launch", type=json.loads, default={}, help="keys of conf/launch, as JSON")
    parser.add_argument("--jobs", type=int, default=2, help="families at a time, on one GPU")
    parser.add_argument("--conversations", type=int, default=60)
    parser.add_argument("--until", choices=["prompts", "features"], default="features")
    given = parser.parse_args()
    prompts = given.work / "data/prompts"
    if not prompts.exists():
        run("precompute.py", f"prompts.path={ROOT}/tests/assets/prompts/train.jsonl", f"out_dir={given.work}/data",
            "prompts/privacy=off", f"prompts.limit={given.conversations}", "answers=imported",
            "stages=[prompts]")  # fmt: skip
    if given.until == "prompts":
        return
    targets = {name: random_target(name, given.work / name / "target") for name in given.families}
    with ThreadPoolExecutor(given.jobs) as threads:
        port = int(given.launch.get("port", 30000))
        jobs = {
            name: threads.submit(compare, given.work / name, target, prompts, {**given.launch, "port": port + 50 * at})
            for at, (name, target) in enumerate(targets.items())
        }
        found = {name: job.result() for name, job in jobs.items()}
    print(json.dumps(write_result(given.out, {"families": found}), indent=1))


def compare(folder: Path, target: Path, prompts: Path, launch: dict[str, Any]) -> dict[str, Any]:
    """Make both stores, and say what the start said and how far they are apart."""
    data = folder / "data"
    data.mkdir(exist_ok=True)
    if not (data / "prompts").exists():
        (data / "prompts").symlink_to(prompts.resolve())
    given = [f"target.path={target}", f"out_dir={data}", "target.check_health=false"]
    engine = ["features=sglang", *(f"launch.{key}={as_override(value)}" for key, value in launch.items())]
    facts: dict[str, Any] = {}
    try:
        run("precompute.py", *given, "answers=imported", "stages=[responses]")
        said = run("precompute.py", *given, *engine, f"features.path={folder}/sglang", "stages=[features]")
    except subprocess.CalledProcessError as error:
        return {"failed": error.output.strip().splitlines()[-1]}
    if found := re.search(r"log-probabilities are those .* within ([\d.]+) nats; ([\d.]+) % of teachers", said):
        facts |= {"nats": float(found[1]), "teachers_of_lm_head": float(found[2]) / 100}
    if found := re.search(r"differ from Hugging Face's by ([\d.]+) %", said):
        facts["sentinels"] = float(found[1]) / 100
    try:
        run("precompute.py", *given, f"features.path={folder}/huggingface", "stages=[features]")
    except subprocess.CalledProcessError as error:
        return {**facts, "huggingface": error.output.strip().splitlines()[-1]}
    return facts | differences(folder / "huggingface", folder / "sglang")


def random_target(name: str, folder: Path) -> Path:
    kind, changes, quantise = FAMILIES[name]
    if (folder / "config.json").exists():
        return folder
    torch.manual_seed(0)
    text = {**SHAPE, **changes}
    tokenizer = transformers.AutoTokenizer.from_pretrained(TOKENIZER)
    if name == "gemma3":
        config = transformers.Gemma3Config(
            text_config=text, vision_config=VISION, mm_tokens_per_image=4, dtype="bfloat16"
        )
        model = transformers.AutoModelForImageTextToText.from_config(config)
        tokenizer = with_images(folder)
    else:
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**text))
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if name == "gemma3":  # as published: transformers' later versions save other names
        weights = load_file(folder / "model.safetensors")
        old, new = "vision_tower.", "vision_tower.vision_model."
        named = {key if new in key else key.replace(old, new): each for key, each in weights.items()}
        save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    if quantise:
        weights, how = quantise(load_file(folder / "model.safetensors"))
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        settings = read_json(folder / "config.json", made_by="")
        write_json(folder / "config.json", {**settings, "quantization_config": how})
    return folder


def with_images(folder: Path) -> Any:
    """Write what turns pictures into tokens, without which a server does not start, and return its tokenizer."""
    tokens = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    tokenizer = transformers.AutoTokenizer.from_pretrained(TOKENIZER, extra_special_tokens=tokens)
    pictures = transformers.Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
    transformers.Gemma3Processor(image_processor=pictures, tokenizer=tokenizer, image_seq_length=4).save_pretrained(
        folder
    )
    return tokenizer


def run(*command: str) -> str:
    print("$ python", *command, flush=True)
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        print(done.stdout, flush=True)
        raise subprocess.CalledProcessError(done.returncode, command, output=done.stdout)
    return done.stdout


if __name__ == "__main__":
    main()
