"""The head that `train.py init_from=HEAD` names, of any trainer whose heads are checked, read to be trained on."""

import logging

import torch

from eagle3.errors import InputError
from eagle3.features.source import FeatureSource, as_setting
from eagle3.head.build import StartHead
from eagle3.head_files.check_config import check_norm_output, check_residual
from eagle3.head_files.computed import not_computed
from eagle3.head_files.files import read_files, weight_files
from eagle3.head_files.finding import TargetFacts
from eagle3.head_files.format import draft_head
from eagle3.storage.files import sha256_file
from eagle3.target.identity import differences

log = logging.getLogger(__name__)


def read_start(path: str, source: FeatureSource) -> StartHead:
    """Read the head in float32; InputError names `init_from`, the fault and how to fix it."""
    embedding, _ = source.target_weights()
    facts = TargetFacts(config=source.target_config, dtype=None, identity=None, embedding=embedding)
    try:
        files = read_files(path)
        if message := next(not_computed(files, facts, check_residual), None):
            raise InputError(message)
        layers = files.trained_layers(source.target_config.num_layers)
        head = draft_head(files, torch.float32)
        hashes = {file.name: sha256_file(file) for file in (files.path / "config.json", *weight_files(files.path))}
    except InputError as error:
        reason = str(error).removeprefix(f"head={path}").removeprefix(":").strip()
        raise InputError(f"init_from={path}: {reason}") from None
    for _, message in check_norm_output(files, facts):
        log.warning("init_from=%s: %s", path, message)
    made_from = source.made_from.target
    if files.record and (differing := differences(files.record.origin.target, made_from)):
        log.warning(
            "init_from=%s was trained on %s, data.path=%s is of %s: they differ in %s, and the head adapts to that",
            path, files.record.origin.target.name, as_setting(source.location), made_from.name, ", ".join(differing),
        )  # fmt: skip
    return StartHead(path, head, layers, hashes)
