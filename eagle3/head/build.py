"""A head that fits a target: sizes and RoPE from the target unless configured, draft vocabulary from the answers."""

import math
from typing import Any

import torch

from eagle3.features.source import FeatureSource
from eagle3.head.draft_head import DraftHead
from eagle3.head.draft_vocab import extended, most_frequent
from eagle3.head.init_from import StartHead, settings_of, take_over
from eagle3.head.registry import kind_named


def build_head(
    *,
    source: FeatureSource,
    kind: str = "eagle3",
    draft_vocab_size: int | None = None,
    default_draft_vocab_size: int = 32000,
    lm_head_from_target: bool = True,
    rope_parameters: dict[str, Any] | None = None,
    start: StartHead | None = None,
    **settings: Any,
) -> DraftHead:
    """Build a head with fresh weights, or with those of `start`.

    `settings` are fields of its kind's config; None takes the value of `start`, or else of the target. With
    draft_vocab_size=None the draft vocabulary of `start` is kept, and extended by answer tokens to the default size."""
    counts = source.answer_counts
    if start and draft_vocab_size is None:
        draft_ids = extended(start.head.draft_ids, counts, default_draft_vocab_size)
    else:
        draft_ids = most_frequent(counts, draft_vocab_size, default_draft_vocab_size)
    settings |= {"rope_parameters": rope_parameters}
    settings = settings_of(start, source, kind, settings) if start else with_norms(settings)
    made = kind_named(kind)
    config = made.config_type.for_target(
        source.target_config,
        num_captured_layers=len(source.made_from.capture_layers),
        draft_vocab_size=len(draft_ids),
        **settings,
    )
    head = made.new_head(config, draft_ids)
    initialise(head, source, lm_head_from_target=lm_head_from_target)
    if start:
        take_over(head, start)
    return head


def with_norms(settings: dict[str, Any]) -> dict[str, Any]:
    """Return `settings` with EAGLE-3.1's norms where they are missing or None."""
    defaults = {"fc_norm": not settings.get("norm_before_fc"), "norm_output": True}
    return settings | {key: value for key, value in defaults.items() if settings.get(key) is None}


def initialise(head: DraftHead, source: FeatureSource, *, lm_head_from_target: bool) -> None:
    """Draw weights of standard deviation 1/√(fan-in); lm_head from the target's rows saves the first epochs."""
    for module in head.modules():
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight, std=1 / math.sqrt(module.in_features))
    if lm_head_from_target:
        _, lm_head = source.target_weights()
        scale = source.target_config.logit_transform.scale  # servers apply none to the head's own logits
        head.lm_head.weight.data.copy_(lm_head[head.draft_ids] * scale)
