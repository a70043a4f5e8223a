"""GPU-hours of the stages: measured rates of one GPU, scaled from the target they were measured with to this one."""

from dataclasses import dataclass
from typing import Any

import torch

from eagle3.estimate.sizes import Tokens
from eagle3.head.draft_head import DraftHead, HeadConfig
from eagle3.target.facts import TargetConfig
from eagle3.target.files import TargetFiles
from eagle3.target.model import decoder_of, empty_model

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
EXPERTS_OF_A_TOKEN = ("num_experts_per_tok", "top_k_experts")


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Keys of conf/estimate: tokens/s of one GPU, each for the parameters it was measured with."""

    target_parameters: float
    head_parameters: float
    answers: dict[str, float]  # answer tokens, by who answers
    features: dict[str, float]
    training: dict[str, float]  # of answers and of prompts


def gpu_hours(
    tokens: Tokens, rates: Rates, *, answered_by: str | None, extracted_by: str, target: float, head: float
) -> dict[str, float]:
    """Return those of each stage; `answered_by=None` where answers are imported. An answer's prompt is read once."""
    prompt_tokens = tokens.tokens - tokens.answer_tokens
    forward, trained = target / rates.target_parameters / 3600, head / rates.head_parameters / 3600
    reading = prompt_tokens / rates.features[answered_by] if answered_by else 0
    answering = tokens.answer_tokens / rates.answers[answered_by] if answered_by else 0
    training = tokens.answer_tokens / rates.training["answers"] + prompt_tokens / rates.training["prompts"]
    return {
        "responses": (reading + answering) * forward,
        "features": tokens.tokens / rates.features[extracted_by] * forward,
        "training_epoch": training * trained,
    }


def active_parameters(files: TargetFiles) -> int:
    """Count what a token is multiplied by: no embedding, and of the experts the share that a token is sent to."""
    model, config = empty_model(files), files.text_config
    embedding: Any = model.get_input_embeddings().weight
    lm_head: Any = model.get_output_embeddings().weight
    share = first_of(config, EXPERTS_OF_A_TOKEN) / first_of(config, EXPERTS)
    total = float(lm_head.numel())
    for name, parameter in decoder_of(model, files.path).named_parameters():
        if parameter is not embedding:
            total += parameter.numel() * (share if ".experts." in name else 1)
    return round(total)


def first_of(config: Any, names: tuple[str, ...]) -> int:
    return next((value for name in names if (value := getattr(config, name, None))), 1)


def head_parameters(target: TargetConfig, layers: int, draft_vocab_size: int) -> int:
    """Count those of an EAGLE-3 head of the target's own sizes."""
    config = HeadConfig.for_target(
        target, num_captured_layers=layers, draft_vocab_size=draft_vocab_size, fc_norm=False, norm_output=False
    )
    with torch.device("meta"):
        head = DraftHead(config, torch.arange(draft_vocab_size))
    return sum(parameter.numel() for parameter in head.parameters())
