"""What a training may go on from: a checkpoint of the same training, and no folder that holds another one."""

import logging
from pathlib import Path
from typing import Any

import torch

from eagle3.data.datamodule import FeatureData
from eagle3.errors import InputError
from eagle3.head.draft_head import DraftHead
from eagle3.target.model import require_same_target
from eagle3.training.module import read_checkpoint

log = logging.getLogger(__name__)
GROUPS = ("data", "loss_mask", "loss", "optim")
# Where the samples lie, how they are read, and in which products and chunks the same loss is computed.
MAY_CHANGE = (
    "data._target_", "data.path", "data.prefetch", "data.readers", "data.verify", "loss._target_", "loss.chunk_rows",
)  # fmt: skip


def decisive_settings(config: dict[str, Any]) -> dict[str, Any]:
    """What a training keeps to from its first step to its last, by config key; `config` is a composed train.yaml."""
    grouped = {f"{group}.{key}": value for group in GROUPS for key, value in config[group].items()}
    settings = {"seed": config["seed"], "ttt_steps": config["ttt_steps"], **grouped}
    return {key: value for key, value in settings.items() if key not in MAY_CHANGE}


def require_own_folder(run_dir: Path, checkpoint: str | None) -> None:
    """A training that starts anew would take the checkpoints of an earlier one for its own."""
    kept = sorted((run_dir / "checkpoints").glob("*.ckpt"))
    if checkpoint is None and kept:
        last = run_dir / "checkpoints" / "last.ckpt"
        raise InputError(
            f"hydra.run.dir={run_dir} holds an earlier training; go on with it by "
            f"ckpt_path={last if last in kept else kept[-1]}, or give another hydra.run.dir"
        )


def require_checkpoint_fits(path: str | None, data: FeatureData, head: DraftHead, settings: dict[str, Any]) -> None:
    """A checkpoint goes on only with its own settings, a head of its making, over features of its target."""
    if path is None:
        return
    if not Path(path).is_file():
        there = ", ".join(sorted(each.name for each in Path(path).parent.glob("*.ckpt"))) or "no checkpoint"
        raise InputError(
            f"ckpt_path={path} does not exist (there is {there}); give RUN/checkpoints/last.ckpt of an earlier run"
        )
    checkpoint = read_checkpoint(path, setting=f"ckpt_path={path}")
    require_same_target(
        checkpoint["eagle3"]["origin"]["target"],
        data.store.manifest["made_from"]["target"],
        expected_from=f"ckpt_path={path}",
        actual_from=f"data.path={data.store.path}",
    )
    differing = _differing(checkpoint["eagle3"]["head_config"], head.config.to_dict())
    if not torch.equal(checkpoint["state_dict"]["head.draft_ids"], head.draft_ids):
        differing.append("other tokens in the draft vocabulary, which the store's answers decide")
    if differing:
        raise InputError(
            f"ckpt_path={path} holds another head than this run's ({', '.join(differing)}); give the model.* settings "
            f"and the data.path of the run that it comes from"
        )
    differing = _differing(checkpoint["eagle3"]["settings"], settings)
    if differing:
        raise InputError(
            f"ckpt_path={path} was trained with other settings ({', '.join(differing)}); give those of that run "
            f"(.hydra/overrides.yaml in its folder), or start anew without ckpt_path"
        )
    if checkpoint["eagle3"]["origin"]["hash"] != data.store.fingerprint:
        log.warning("data.path=%s has changed since %s: samples may be repeated or skipped", data.store.path, path)


def _differing(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    keys = [key for key in before | now if before.get(key) != now.get(key)]
    return [f"{key}={before.get(key)} then, {now.get(key)} now" for key in keys]
