"""The estimate stage: tokens, bytes and GPU-hours of a run before it starts, as a table and in DIR/estimate.json.

Tokens are those in DIR/answers, or without answers those in DIR/prompts and `sampling.max_new_tokens` for every
answer: an upper bound. Bytes are tokens times hidden states, hours are tokens over measured rates of one GPU.
"""

import logging
from collections import Counter
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from eagle3.answers.build import build_chat, prompt_limit
from eagle3.answers.dialogue import Dialogue
from eagle3.answers.store import read_answers, read_rows
from eagle3.errors import MAKE_PROMPTS, InputError
from eagle3.features.build import STORED
from eagle3.head.draft_head import DraftHead, HeadConfig
from eagle3.progress import Bar, duration
from eagle3.settings.precomputing import Engine, PrecomputeRun, Rates, RelativeSpeed
from eagle3.storage.files import read_jsonl, write_json
from eagle3.target.capture import default_capture_layers
from eagle3.target.facts import TargetConfig, layer_count, target_config
from eagle3.target.files import TargetFiles
from eagle3.target.model import empty_model, find_decoder
from eagle3.target.stored import StoredTarget, stored_target

log = logging.getLogger(__name__)
STAGES = ("answers", "features", "training_epoch")
# Keys of configs: experts of a token, experts of a layer.
EXPERTS = ("num_experts_per_tok", "top_k_experts"), ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True)
class Tokens:
    """Totals over all samples of a run; `answers` says how the answers were counted."""

    samples: int
    tokens: int
    answer_tokens: int
    left_out: dict[str, int]
    answers: str


def estimate_run(run: PrecomputeRun) -> dict[str, Any]:
    """Log the table and return its numbers, which are written to DIR/estimate.json."""
    out_dir, target = run.folder, stored_target(**vars(run.target))
    facts = target_config(target.text_config, target.text_config.vocab_size, target.checkpoint_dtype)
    layers = len(run.features.capture_layers or default_capture_layers(layer_count(target.text_config)))
    tokens = tokens_of_answers(run, out_dir) or tokens_of_prompts(run, out_dir, target)
    rates, speed, epochs = run.estimate.rates, run.estimate.relative, run.estimate.epochs
    scaled = {
        "target": active_parameters(target) / rates.target_parameters,
        "head": head_parameters(facts, layers, min(32_000, facts.vocab_size)) / rates.head_parameters,
    }
    engines: dict[str, Engine | None] = {"imported": None, "huggingface": "huggingface"}
    answered_by = engines.get(run.answered_by, "sglang")
    extracted_by: Engine = "sglang" if run.features.engine else "huggingface"
    tied = bool(target.config.tie_word_embeddings)
    hours = gpu_hours(tokens, rates, speed, answered_by=answered_by, extracted_by=extracted_by, **scaled)
    result = {
        **asdict(tokens),
        "bytes": store_bytes(tokens, facts, layers, teachers=run.features.teachers, tied=tied),
        "gpu": run.estimate.gpu,
        "epochs": epochs,
        "gpu_hours": hours | {"total": hours["answers"] + hours["features"] + epochs * hours["training_epoch"]},
        "scaled": scaled,
    }
    write_json(out_dir / "estimate.json", result)
    for line in table(result):
        log.info("%s", line)
    return result


def tokens_of_answers(run: PrecomputeRun, out_dir: Path) -> Tokens | None:
    """Count the rows of an answers stage that has ended or is running; None if there are none."""
    folder = out_dir / "answers"
    manifest = read_answers(folder) if (folder / "manifest.json").exists() else None
    finished, max_length, sizes, left_out = 0, run.features.max_length, [], Counter[str]()
    for row in read_rows(folder) if manifest else ():
        finished += row.last_of_prompt
        if len(row.input_ids) > max_length and run.features.too_long == "drop":
            left_out["longer than features.max_length"] += 1
            continue
        length = min(len(row.input_ids), max_length)
        sizes.append((length, sum(min(end, length) - min(begin, length) for begin, end in row.turns)))
    if not (manifest and finished):
        return None
    scale = 1.0 if manifest.complete else number_of_prompts(out_dir) / finished
    return totals(sizes, scale, left_out, answers=f"of {finished} prompts in {folder}")


def tokens_of_prompts(run: PrecomputeRun, out_dir: Path, target: StoredTarget) -> Tokens:
    """Count about `estimate.prompts` prompts, evenly spread; the template's own tokens around the first turn only."""
    if run.answered_by == "imported":
        raise InputError(f"{out_dir}/answers has no imported answers to count; run stages=[answers], without a GPU")
    count = number_of_prompts(out_dir)
    step = max(1, count // run.estimate.prompts)
    longest, chat = run.sampling.max_new_tokens, build_chat(run.chat, target)
    most = prompt_limit(target.text_config, longest, run.sampling.max_prompt_tokens)
    sizes, left_out = [], Counter[str]()
    for prompt in islice(read_jsonl(out_dir / "prompts" / "prompts.jsonl"), 0, None, step):
        dialogue = Dialogue(prompt, chat, seed=0, max_prompt_tokens=most, on_length="keep")
        if not dialogue.waiting:
            left_out[dialogue.errors[-1].kind] += 1
            continue
        questions = [message["content"] for message in prompt["messages"] if message["role"] == "user"]
        asked = len(dialogue.prompt_ids) + sum(len(chat.encode(text)) for text in questions[1:])
        answered = longest * len(questions)
        length = min(asked + answered, run.features.max_length)
        sizes.append((length, min(answered, length)))
    scale = count / -(-count // step)
    return totals(sizes, scale, left_out, answers=f"at most {longest} tokens each (sampling.max_new_tokens)")


def number_of_prompts(out_dir: Path) -> int:
    path = out_dir / "prompts" / "prompts.jsonl"
    if not (path.is_file() and path.stat().st_size):
        raise InputError(f"{path} does not exist or is empty, and an estimate needs prompts; make it: {MAKE_PROMPTS}")
    with path.open("rb") as lines:
        return sum(1 for _ in lines)


def totals(sizes: list[tuple[int, int]], scale: float, left_out: Counter[str], *, answers: str) -> Tokens:
    kept = [size for size in sizes if size[1] > 1]
    left_out["no answer of two tokens or more"] += len(sizes) - len(kept)
    if not kept:
        raise InputError(
            f"no prompt gives a sample; change what leaves them out, for answers of one token features.max_length or "
            f"sampling.max_new_tokens: {dict(+left_out)}"
        )
    tokens, answer_tokens = (round(sum(numbers) * scale) for numbers in zip(*kept, strict=True))
    skipped = {reason: round(number * scale) for reason, number in left_out.items()}
    return Tokens(round(len(kept) * scale), tokens, answer_tokens, skipped, answers)


def store_bytes(tokens: Tokens, facts: TargetConfig, layers: int, *, teachers: str, tied: bool) -> dict[str, int]:
    """Return the size of the store's hidden states and target weights in each `features.dtype`."""
    last_hidden = tokens.tokens if teachers == "all" else tokens.answer_tokens
    values = (tokens.tokens * layers + last_hidden) * facts.hidden_size
    weights = facts.vocab_size * facts.hidden_size * (1 if tied else 2)  # embedding and lm_head
    return {
        name: values * dtype.itemsize + weights * (2 if dtype.itemsize == 1 else dtype.itemsize)
        for name, dtype in STORED.items()
    }


def gpu_hours(
    tokens: Tokens,
    rates: Rates,
    speed: RelativeSpeed,
    *,
    answered_by: Engine | None,
    extracted_by: Engine,
    target: float,
    head: float,
) -> dict[str, float]:
    """`target` and `head` are sizes relative to the measured ones; imported answers have `answered_by=None`."""
    prompt_tokens = tokens.tokens - tokens.answer_tokens
    reading = prompt_tokens / rates.features[answered_by] if answered_by else 0
    answering = tokens.answer_tokens / rates.answers[answered_by] if answered_by else 0
    training = tokens.answer_tokens / rates.training["answers"] + prompt_tokens / rates.training["prompts"]
    return {
        "answers": (reading / speed.compute + answering / speed.bandwidth) * target / 3600,
        "features": tokens.tokens / rates.features[extracted_by] * target / speed.compute / 3600,
        "training_epoch": training * head / speed.compute / 3600,
    }


def active_parameters(files: TargetFiles) -> int:
    """Count the parameters that a token is multiplied by: no embedding, and top_k / num_experts of the experts."""
    model, config = empty_model(files), files.text_config
    embedding: Any = model.get_input_embeddings().weight
    lm_head: Any = model.get_output_embeddings().weight
    chosen, experts = (next((n for key in keys if (n := getattr(config, key, None))), 1) for keys in EXPERTS)
    total = float(lm_head.numel())
    for name, parameter in find_decoder(model, files.path).named_parameters():
        if parameter is not embedding:
            total += parameter.numel() * (chosen / experts if ".experts." in name else 1)
    return round(total)


def head_parameters(target: TargetConfig, layers: int, draft_vocab_size: int) -> int:
    """Count the parameters of an EAGLE-3 head with the target's sizes."""
    config = HeadConfig.for_target(
        target, num_captured_layers=layers, draft_vocab_size=draft_vocab_size, fc_norm=False, norm_output=False
    )
    with torch.device("meta"):
        head = DraftHead(config, torch.arange(draft_vocab_size))
    return sum(parameter.numel() for parameter in head.parameters())


def table(result: dict[str, Any]) -> list[str]:
    prompt_tokens, hours = result["tokens"] - result["answer_tokens"], result["gpu_hours"]
    total = f"total, {result['epochs']} epochs"
    return [
        f"answers: {result['answers']}",
        f"{result['samples']:,} samples, {prompt_tokens:,} prompt tokens, {result['answer_tokens']:,} answer tokens",
        *(f"features.dtype={name:<10}{Bar.format_sizeof(size, 'B'):>10}" for name, size in result["bytes"].items()),
        *(f"{stage:<24}{duration(3600 * hours[stage]):>10}" for stage in STAGES),
        f"{total:<24}{duration(3600 * hours['total']):>10} of one {result['gpu']}, at least",
    ]
