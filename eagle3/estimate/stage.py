"""The estimate stage: one table, and DIR/estimate.json with the same numbers."""

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedConfig

from eagle3.answers.chat import Chat
from eagle3.answers.imported import ImportedAnswers, imported_rows
from eagle3.answers.stage import prompt_limit
from eagle3.errors import InputError
from eagle3.estimate.conversations import RowsOf, expected_conversations, stand_ins
from eagle3.estimate.hours import Rates, active_parameters, gpu_hours, head_parameters
from eagle3.estimate.sizes import Layout, count_tokens, store_sizes, values_of_target
from eagle3.storage.files import write_json
from eagle3.target.facts import context_of, target_config
from eagle3.target.files import TargetFiles

log = logging.getLogger(__name__)
NAMES = {"responses": "responses", "features": "features", "training_epoch": "an epoch"}
MOST_DRAFTED = 32_000  # as conf/model has it, where answers hold as many different tokens


def estimate(
    *,
    files: TargetFiles,
    rows_of: RowsOf,
    answers: str,
    out_dir: Path,
    layers: int,
    features: dict[str, Any],
    answered_by: str | None,
    extracted_by: str,
    prompts: int,
    workers: int,
    gpu: str,
    rates: Rates,
) -> dict[str, Any]:
    """Return tokens, bytes and hours of a run on DIR/prompts, and write them to DIR/estimate.json.

    `answers` says what `rows_of` takes for the answers that are not there yet; `layers` are captured."""
    expected = expected_conversations(out_dir, files, prompts, rows_of, answers)
    facts = target_config(files.text_config, files.text_config.vocab_size, files.checkpoint_dtype)
    layout = Layout(hidden_size=facts.hidden_size, layers=layers, **features)
    conversations, left_out = layout.conversations(expected.rows)
    if not conversations:
        raise InputError(
            f"{out_dir}: of the prompts that were looked at none gives a sample (left out: {dict(left_out)}); raise "
            f"estimate.prompts={prompts} or features.max_length={layout.max_length}"
        )
    tokens = count_tokens(conversations, expected.scale)
    weights = values_of_target(facts, tied=bool(files.config.tie_word_embeddings))
    sizes = store_sizes(conversations, expected.scale, layout, weights)
    target, head = active_parameters(files), head_parameters(facts, layers, min(MOST_DRAFTED, facts.vocab_size))
    hours = gpu_hours(tokens, rates, answered_by=answered_by, extracted_by=extracted_by, target=target, head=head)
    result = {
        "prompts": expected.prompts,
        "answers": expected.answers,
        "looked_at": len(expected.rows),
        **asdict(tokens),
        "left_out": {reason: round(count * expected.scale) for reason, count in left_out.items()},
        "features": {dtype: asdict(size) for dtype, size in sizes.items()},
        "gpu": gpu,
        "gpu_hours": hours,
        "workers": workers,
        "hours": {stage: value / workers for stage, value in hours.items()},
        "scaled": {"target": target / rates.target_parameters, "head": head / rates.head_parameters},
    }
    write_json(out_dir / "estimate.json", result)
    for line in table(result):
        log.info("%s", line)
    return result


def rows_of_prompts(
    chat: Chat, config: PreTrainedConfig, responses: dict[str, Any], *, imported: ImportedAnswers | None, mean: int
) -> tuple[RowsOf, str]:
    """Return what makes rows of a prompt that has no answer of the target yet, and what it takes for answers.

    `responses` are the keys of conf/responses, `mean` the tokens of an answer."""
    context, most = context_of(config), responses["max_prompt_tokens"]
    if imported:
        limits = {"max_prompt_tokens": most, "context": context}
        return lambda prompt: imported_rows(prompt, chat, imported, **limits)[0], "imported"
    longest = responses["max_new_tokens"]
    tokens = min(mean, longest)
    rows_of = stand_ins(
        chat,
        tokens=tokens,
        cut=tokens == longest and responses["on_length"] == "keep",
        max_prompt_tokens=prompt_limit(context, longest, most),
    )
    bound = "responses.max_new_tokens" if tokens < mean else "estimate.answer_tokens"
    return rows_of, f"of {tokens} tokens each ({bound})"


def table(result: dict[str, Any]) -> list[str]:
    """Write the numbers for people."""
    prompt_tokens = result["tokens"] - result["answer_tokens"]
    lines = [
        f"{result['prompts']:,} prompts; answers: {result['answers']}; from {result['looked_at']:,} conversations:",
        f"{result['samples']:,} samples, {prompt_tokens:,} prompt tokens, {result['answer_tokens']:,} answer tokens",
        f"{'features.dtype':<16}{'size':>12}{'kB a token':>12}{'shards':>10}{'objects':>10}{'data.cache_gb':>15}",
    ]
    for dtype, size in result["features"].items():
        total = tqdm.format_sizeof(size["bytes"] + size["beside"], "B")
        lines.append(
            f"{dtype:<16}{total:>12}{size['bytes'] / result['tokens'] / 1e3:>12.2f}{size['shards']:>10,}"
            f"{size['objects']:>10,}{size['cache_gb']:>15,.1f}"
        )
    lines.append(f"{'stage':<16}{'GPU-hours':>12}{'hours':>12}   of {result['workers']} x {result['gpu']}")
    for stage, name in NAMES.items():
        lines.append(f"{name:<16}{figures(result['gpu_hours'][stage]):>12}{figures(result['hours'][stage]):>12}")
    scaled = result["scaled"]
    return [
        *lines,
        f"hours: rates measured with an 8B target, times this target's active parameters ({scaled['target']:.3g} of "
        f"theirs) and its head's ({scaled['head']:.3g}); loading, validation and hours lost are not in them",
    ]


def figures(value: float) -> str:
    """Write two decimals, or two digits where those would be zeros."""
    return f"{value:,.2f}" if value >= 0.1 else f"{value:.2g}"
