"""Checks of what the head was trained on: the layers that it reads, and its target."""

import logging
from collections.abc import Iterator
from pathlib import PurePath

from eagle3.decoding.speculate import require_topk
from eagle3.engine.versions import takes_ids_for_inputs
from eagle3.errors import InputError
from eagle3.head_files.files import IDS_KEY, LAYER_IDS, HeadFiles, layer_id_entries
from eagle3.head_files.finding import Level, Problem, TargetFacts
from eagle3.head_files.format import head_config, read_kind
from eagle3.target.facts import target_config
from eagle3.target.files import TargetFiles
from eagle3.target.identity import TargetIdentity, differences, other_precision

log = logging.getLogger(__name__)


def require_fits(
    files: HeadFiles, target: TargetFiles, *, steps: int, topk: int, head: str = "head", shape: str = ""
) -> None:
    """Raise InputError for a head that cannot draft for the target, or not in this shape, before the target is loaded.
    `head` and `shape` are the keys that name them."""
    config = head_config(files)
    facts = target_config(target.text_config, target.text_config.vocab_size, target.checkpoint_dtype)
    for key in ("hidden_size", "vocab_size"):
        if getattr(config, key) != getattr(facts, key):
            raise InputError(
                f"{head}: {files.path} is for a target with {key}={getattr(config, key)}, "
                f"target.path={target.path} has {getattr(facts, key)}; give the target that it was trained on"
            )
    files.served_layers(facts.num_layers)
    read_kind(files).require_steps(config, steps, setting=f"{shape}steps", head=str(files.path))
    require_topk(topk, config.draft_vocab_size, setting=f"{shape}topk", head=str(files.path))


def check_layer_ids(files: HeadFiles, facts: TargetFacts) -> Iterator[Problem]:
    """config.json names the layers where its server looks for them; training.json, if there, names the same."""
    ids, layers = files.layer_ids, files.served_layers(facts.config.num_layers)
    if files.nested:  # the layout of the speculators, which vLLM reads
        if not files.top_level_ids:
            yield "warning", f"config.json names no layers: vLLM takes its default, the inputs of {layers}"
        return
    served, trained = [layer - 1 for layer in layers], files.record.origin.capture_layers if files.record else layers
    if layers != trained:
        hint = " (those are the inputs of layers, SGLang counts outputs)" if served == trained else ""
        named = f"layer ids {ids}" if ids else f"{IDS_KEY} is missing, and the layer ids of SGLang's default {served}"
        outputs = [layer - 1 for layer in trained]
        yield "error", f"{named} are not those of the training, {outputs}{hint}; set {layer_id_entries(trained)}"
    elif ids is None:
        yield from _without_ids(files, layers)
    elif ids != served:
        yield (
            "error",
            f"layer ids {ids} do not ascend: SGLang joins the layers as it passes them, {served}; set "
            f"{layer_id_entries(layers)}, and reorder the columns of fc.weight likewise if the head was trained in the "
            f"order of the list",
        )
    elif files.record is None and not files.top_level_ids:
        yield "warning", f"layer ids {ids}: no file says what they count; {_two_readings(ids)}"
    elif takes_ids_for_inputs(facts.config.model_type, ids):
        yield (
            "warning",
            f"layer ids {ids} do not start with 1: for targets of model_type={facts.config.model_type} SGLang then "
            f"takes them for inputs of layers; train with features.capture_layers that start with 2, or for SGLang "
            f"alone set {IDS_KEY} to {layers} and remove {LAYER_IDS} from the top level",
        )


def _without_ids(files: HeadFiles, layers: list[int]) -> Iterator[Problem]:
    """Check a head that names no layers where SGLang reads them: some trainers leave the default out."""
    elsewhere, served = files.top_level_ids, [layer - 1 for layer in layers]
    default = f"SGLang takes its default, the outputs of {served}"
    if not elsewhere:
        advice = f"set {layer_id_entries(layers)} if the training had these"
        yield "warning", f"config.json names no layers: {default}; {advice}"
        return
    # Trainers for vLLM write `hidden_states` indices there, others have copied SGLang's ids to this place.
    level: Level = "warning" if served in (elsewhere, [layer - 1 for layer in elsewhere]) else "error"
    place = f"{LAYER_IDS}={elsewhere} is at the top level, which SGLang does not read"
    yield level, f"{place}: {default}; {_two_readings(elsewhere)}"


def _two_readings(ids: list[int]) -> str:
    """Name the layers that ids of another trainer may mean. On layers one off, a head still drafts, but worse."""
    outputs = layer_id_entries([layer + 1 for layer in ids])
    return (
        f"set {layer_id_entries(ids)} if the training counted hidden_states, as vLLM does, or {outputs} if it counted "
        f"outputs of layers, as SGLang does"
    )


def check_target(files: HeadFiles, facts: TargetFacts) -> Iterator[Problem]:
    """The target is the one that the head was trained on."""
    if facts.identity is None:
        yield "skipped", "no target to compare with"
    elif files.record is None:  # the speculators' config may have a name; other trainers' say nothing
        name = facts.identity.name
        trained = ((files.config.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")
        if not trained:
            yield "skipped", "nothing in the folder says which target the head was trained on"
        elif PurePath(trained).name != PurePath(name).name:
            yield "warning", f"the head was trained on {trained}, by name another target than {name}; give that"
    else:
        yield from _by_identity(files.record.origin.target, facts.identity)


def warn_of_precision(files: HeadFiles, served: TargetIdentity) -> None:
    """Say what differs where the target may be that of the training in another precision, and is measured anyway."""
    if files.record and (difference := other_precision(files.record.origin.target, served)):
        log.warning("head=%s: %s", files.path, difference)


def _by_identity(trained: TargetIdentity, served: TargetIdentity) -> Iterator[Problem]:
    """Compare the contents of two folders, wherever they are."""
    differing = differences(trained, served)
    if "template" in differing:
        differing.remove("template")
        yield "warning", "the chat template differs from the training's; set chat.template to the one that is served"
    if difference := other_precision(trained, served):
        yield "warning", difference
    else:
        for part in differing:
            yield "error", f"{part}: the head was trained on {trained.known_as}, not on {served.known_as}; use that"
