"""A head that fits a target: sizes and RoPE from the target unless configured, draft vocabulary from the answers.

A training may start from a head that any trainer made: it must fit, and its weights are copied.

Shapes: V target vocabulary, D draft vocabulary.
"""

import logging
import math
from dataclasses import asdict, dataclass, fields
from inspect import signature
from typing import Any

import torch

from eagle3.errors import InputError
from eagle3.features.source import FeatureSource, as_setting
from eagle3.head.draft_vocab import ALIGNED, MULTIPLE, extended, most_frequent
from eagle3.head.head import Head
from eagle3.head.kind import Kind
from eagle3.head.registry import kind_named, new_head
from eagle3.settings.nearest import did_you_mean
from eagle3.settings.training import Model
from eagle3.settings.types import shown

log = logging.getLogger(__name__)
# Set by the new draft vocabulary and the target.
NOT_TAKEN_OVER = ("draft_vocab_size", "num_captured_layers", "max_position_embeddings")
OF_TARGET = ("hidden_size", "vocab_size", "draft_vocab_size", "num_captured_layers")  # no settings of a head


@dataclass(frozen=True)
class StartHead:
    """A head to start from: `path` is what `init_from` names, `capture_layers` index Hugging Face's `hidden_states`,
    `files` are the sha256 of its files by name."""

    path: str
    head: Head
    capture_layers: list[int]
    files: dict[str, str]


def build_head(
    *,
    source: FeatureSource,
    kind: str,
    draft_vocab_size: int | None,
    default_draft_vocab_size: int,
    lm_head_from_target: bool,
    train_lm_head: bool,
    start: StartHead | None = None,
    **settings: Any,
) -> Head:
    """Build a head with fresh weights, or with those of `start`.

    `settings` are fields of its kind's config; None takes the value of `start`, or else of the target. With
    draft_vocab_size=None the draft vocabulary of `start` is kept, and extended by answer tokens to the default size."""
    if not (train_lm_head or lm_head_from_target):
        raise InputError(
            "model.train_lm_head=false keeps lm_head as it begins, and model.lm_head_from_target=false begins with "
            "random rows; set one of them to true"
        )
    counts = source.answer_counts
    if draft_vocab_size is None:
        kept = start.head.draft_ids if start else torch.empty(0, dtype=torch.long)
        draft_ids = extended(kept, counts, default_draft_vocab_size)
    else:
        draft_ids = most_frequent(counts, draft_vocab_size)
    if len(draft_ids) % ALIGNED:
        log.warning(
            f"draft vocabulary of {len(draft_ids)} tokens: with a multiple of {MULTIPLE} a GPU trains it faster"
        )
    given, settings = settings, take_over_settings(start, source, kind, settings) if start else settings
    made = kind_named(kind)
    require_known(given, made)
    settings = {key: value for key, value in settings.items() if value is not None}
    config = made.new_config(
        source.target_config,
        num_captured_layers=len(source.made_from.capture_layers),
        draft_vocab_size=len(draft_ids),
        **settings,
    )
    head = new_head(made, config, draft_ids)
    initialise(head, source, lm_head_from_target=lm_head_from_target)
    if start:
        take_over(head, start)
    head.lm_head.requires_grad_(train_lm_head)
    return head


def require_known(settings: dict[str, Any], kind: Kind) -> None:
    """Raise InputError for a key that the kind's config has not, or takes from the target alone.

    Keys that conf/model has for every kind may be null."""
    known = {field.name for field in fields(kind.config_type)} - {*OF_TARGET}
    unset = {key for key in Model.__annotations__ if settings.get(key) is None}
    for key in sorted(settings.keys() - known - unset):
        others = {name for name in signature(build_head).parameters if name not in ("source", "start", "settings")}
        meant = did_you_mean(f"model.{key}", [f"model.{name}" for name in sorted(known | others)])
        slip = f"model.{key}={shown(settings[key])}"
        raise InputError(f"{slip} is not a key of model.kind={kind.name}{meant}; correct the file that sets it")


def initialise(head: Head, source: FeatureSource, *, lm_head_from_target: bool) -> None:
    """Draw weights of standard deviation 1/√(fan-in); lm_head from the target's rows saves the first epochs."""
    for module in head.modules():
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight, std=1 / math.sqrt(module.in_features))
    if lm_head_from_target:
        _, lm_head = source.target_weights()
        scale = source.target_config.logit_transform.scale  # servers apply none to the head's own logits
        head.lm_head.weight.data.copy_(lm_head[head.draft_ids] * scale)


def take_over_settings(start: StartHead, source: FeatureSource, kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return `settings` (keys of conf/model) with the head's own values in place of None.

    Raises InputError if the head does not fit the features, or a setting contradicts it."""
    theirs = start.head.config
    if kind != start.head.kind:
        of_kind = f"init_from={start.path} is of kind {start.head.kind}"
        raise InputError(f"model.kind={kind}: {of_kind}; set model.kind to that")
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
def take_over(head: Head, start: StartHead) -> None:
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
