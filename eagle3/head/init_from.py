"""The head that a training starts from, made by any trainer: checks that it fits, and copies its weights.

Shapes: V target vocabulary, D draft vocabulary.
"""

import logging
from dataclasses import asdict, dataclass
from typing import Any

import torch

from eagle3.errors import InputError
from eagle3.features.source import FeatureSource, as_setting
from eagle3.head.draft_head import DraftHead

log = logging.getLogger(__name__)
# Set by the new draft vocabulary and the target.
NOT_TAKEN_OVER = ("draft_vocab_size", "num_captured_layers", "max_position_embeddings")


@dataclass(frozen=True)
class StartHead:
    """A head to start from: `path` is what `init_from` names, `capture_layers` index Hugging Face's `hidden_states`,
    `files` are the sha256 of its files by name."""

    path: str
    head: DraftHead
    capture_layers: list[int]
    files: dict[str, str]


def settings_of(start: StartHead, source: FeatureSource, kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return `settings` (keys of conf/model) with the head's own values in place of None.

    Raises InputError if the head does not fit the features, or a setting contradicts it."""
    theirs = start.head.config
    if kind != theirs.KIND:
        raise InputError(f"model.kind={kind}: init_from={start.path} is of kind {theirs.KIND}; set model.kind to that")
    require_same_input(start, source)
    held = {key: value for key, value in asdict(theirs).items() if key not in NOT_TAKEN_OVER}
    for key, value in settings.items():
        given = {"rope_type": "default", **value} if key == "rope_parameters" and value else value
        if given is not None and key in held and given != held[key]:
            raise InputError(
                f"model.{key}={value} contradicts init_from={start.path}, whose head has {held[key]}; leave it null to "
                f"take the head's, or train from scratch without init_from"
            )
    return settings | held


def require_same_input(start: StartHead, source: FeatureSource) -> None:
    """Raise InputError unless the head reads the store's hidden states and drafts from the store's vocabulary."""
    data = f"data.path={as_setting(source.location)}"
    for key in ("hidden_size", "vocab_size"):
        theirs, ours = getattr(start.head.config, key), getattr(source.target_config, key)
        if theirs != ours:
            raise InputError(
                f"init_from={start.path} has {key}={theirs}, the target of {data} has {ours}; start from a head of "
                f"that target"
            )
    if start.capture_layers != source.made_from.capture_layers:
        raise InputError(
            f"init_from={start.path} reads the hidden states {start.capture_layers}, {data} holds "
            f"{source.made_from.capture_layers}; make features with features.capture_layers={start.capture_layers}"
        )


@torch.no_grad()
def take_over(head: DraftHead, start: StartHead) -> None:
    """Copy the weights into `head`: of `lm_head` only the rows of tokens that both draft, counted in the log."""
    weights = dict(start.head.named_parameters())
    rows = weights.pop("lm_head.weight")
    for name, weight in weights.items():
        head.get_parameter(name).copy_(weight)
    row_of = torch.full((head.config.vocab_size,), -1)  # (V,)
    row_of[start.head.draft_ids] = torch.arange(len(rows))
    taken = row_of[head.draft_ids]  # (D,)
    known = taken >= 0
    head.lm_head.weight[known] = rows[taken[known]]
    log.info(
        "init_from=%s: the draft vocabulary of %d keeps %d of the head's %d tokens, %d are new",
        start.path, len(taken), int(known.sum()), len(rows), int((~known).sum()),
    )  # fmt: skip
