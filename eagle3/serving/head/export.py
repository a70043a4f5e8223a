"""Training checkpoint → head in SGLang's format, with training.json saying where it comes from."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from eagle3.decoding.speculate import require_topk
from eagle3.errors import InputError
from eagle3.head.draft_head import DraftHead, HeadConfig
from eagle3.serving.check.accept_length import CHECK, Judge
from eagle3.serving.check.checks import run_checks
from eagle3.serving.check.finding import Finding, TargetFacts, has_errors, target_facts
from eagle3.serving.check.layer_notation import outputs
from eagle3.serving.head.files import read_files
from eagle3.serving.head.format import is_head, load_head, save_head
from eagle3.storage import read_json, write_json
from eagle3.target.model import DTYPES
from eagle3.training.checkpoint import read_checkpoint

MAKE_RUN = "python train.py data.path=DIR/features hydra.run.dir=RUN"


@dataclass(frozen=True)
class TrainedHead:
    """What a training checkpoint holds: the head in float32, and `facts` as HeadTraining writes them."""

    checkpoint: Path
    head: DraftHead
    facts: dict[str, Any]

    @property
    def origin(self) -> dict[str, Any]:
        return self.facts["origin"]

    @property
    def dtype(self) -> str:
        """The target's, which the head is served in."""
        return self.origin["target_config"]["dtype"]


def find_checkpoint(*, run: str | None, checkpoint: str | None) -> Path:
    """The given checkpoint, or the best of a run: the one result.json names, else the newest that is not the last."""
    if checkpoint is not None:
        return _existing(Path(checkpoint), f"checkpoint={checkpoint}")
    if run is None:
        raise InputError("run is not set; give the folder of a training run: run=RUN (or checkpoint=FILE.ckpt)")
    folder = Path(run) / "checkpoints"
    if (Path(run) / "result.json").is_file():
        best = Path(read_json(Path(run) / "result.json", made_by=MAKE_RUN)["checkpoint"])
        return _existing(folder / best.name, f"run={run}")  # by name: the run's folder may have moved
    found = sorted(folder.glob("*.ckpt"), key=lambda path: (path.name != "last.ckpt", path.stat().st_mtime))
    return _existing(found[-1] if found else folder / "last.ckpt", f"run={run}")


def _existing(path: Path, setting: str) -> Path:
    if not path.is_file():
        raise InputError(f"{setting}: {path} does not exist; name a finished run or make one with: {MAKE_RUN}")
    return path


def read_trained(path: Path) -> TrainedHead:
    checkpoint = read_checkpoint(path, setting="run or checkpoint")
    facts, prefix = asdict(checkpoint.record), "head."
    weights = {name.removeprefix(prefix): w for name, w in checkpoint.weights.items() if name.startswith(prefix)}
    head = DraftHead(HeadConfig(**facts["head_config"]), weights["draft_ids"])
    head.load_state_dict(weights)
    return TrainedHead(path, head.eval().requires_grad_(False), facts)


def export_head(trained: TrainedHead, directory: Path, *, versions: dict[str, str]) -> None:
    """Write the head's folder, whole or not at all; an older head there is replaced, anything else is not."""
    with atomic_folder(directory) as temporary:
        save_head(temporary, trained.head, trained.origin["capture_layers"], trained.dtype)
        write_json(temporary / "training.json", training_facts(trained, versions))


def training_facts(trained: TrainedHead, versions: dict[str, str]) -> dict[str, Any]:
    """training.json: hashes, paths and numbers; nothing of the text that the head learned from."""
    facts, origin = trained.facts, trained.origin
    return {
        "head_config": facts["head_config"],
        "capture_layers": origin["capture_layers"],  # indices into hidden_states; config.json counts layer outputs
        "ttt_steps": facts["ttt_steps"],
        "simulated_accept_length": simulated_accept_length(facts),
        "accept_length": None,  # by our decoder, once the target has been there
        "target": origin["target"],
        "store": {"path": origin["path"], "hash": origin["hash"], "val_fraction": origin["val_fraction"]},
        "checkpoint": str(trained.checkpoint.resolve()),
        "versions": versions,
    }


def simulated_accept_length(facts: dict[str, Any]) -> dict[str, float]:
    """Steps → the accept length that validation measured in rounds, as a server counts them."""
    prefix = "val/served_accept_length_"
    return {key.removeprefix(prefix): value for key, value in facts["accept_length"].items() if key.startswith(prefix)}


@contextmanager
def atomic_folder(directory: Path) -> Iterator[Path]:
    """A folder to write into, that takes the place of `directory` when the block ends well."""
    require_replaceable(directory)
    temporary, replaced = (directory.with_name(f".{directory.name}.{os.getpid()}.{kind}") for kind in ("tmp", "old"))
    temporary.mkdir(parents=True)
    try:
        yield temporary
        if directory.exists():
            directory.rename(replaced)
        temporary.rename(directory)
    finally:
        if replaced.exists() and not directory.exists():
            replaced.rename(directory)
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)


def require_replaceable(directory: Path) -> None:
    if directory.name in ("", ".."):
        raise InputError(f"head={directory} gives the folder no name of its own; name it, e.g. head=heads/first")
    if directory.exists() and not is_head(directory) and not (directory.is_dir() and not any(directory.iterdir())):
        raise InputError(f"head={directory} exists and is no exported head: it is left alone; name another folder")


# --- checks ----------------------------------------------------------------------------------------------------------


def target_settings(settings: dict[str, Any], trained: TrainedHead) -> dict[str, Any]:
    """The `target` keys, with the path and revision that the features were made from where no path is set."""
    recorded = {"path": trained.origin["target"]["name"], "revision": trained.origin["target"]["revision"]}
    return settings if settings["path"] is not None else settings | recorded


def check_export(trained: TrainedHead, directory: Path, judge: Judge | str) -> list[Finding]:
    """All checks of a fresh export; `judge` is the reason where there is no target to measure with.

    The accept length goes into training.json, for later checks to compare with."""
    files = read_files(directory)
    if isinstance(judge, str):
        config = trained.origin["target_config"]
        facts = TargetFacts(config=config, dtype=trained.dtype, fingerprint=None, embedding=None)
        return [check_reload(trained, directory), *run_checks(files, facts), Finding(CHECK, "skipped", judge)]
    facts = target_facts(judge.target, trained.origin["target"]["template_hash"])
    findings = [check_reload(trained, directory), *run_checks(files, facts)]
    if has_errors(findings):
        return [*findings, Finding(CHECK, "skipped", "mend the errors above first")]
    require_topk(judge.decoding.topk, trained.head.config.draft_vocab_size)
    prompts = judge.prompts(files.training)
    try:
        result = judge.measured(directory, prompts)
    except InputError as reason:  # of the kind of target, or its answers are one token long: no fault of the export
        return [*findings, Finding(CHECK, "skipped", str(reason))]
    write_json(directory / "training.json", (files.training or {}) | {"accept_length": result})
    return [*findings, excused(judge.judged(result, files.training), trained, judge.min_accept_length)]


def excused(finding: Finding, trained: TrainedHead, min_accept_length: float) -> Finding:
    """A short accept length is no fault of the export if validation during training simulated no more."""
    simulated = simulated_accept_length(trained.facts).values()
    if finding.level == "error" and min(simulated, default=min_accept_length) < min_accept_length:
        return replace(finding, level="warning")
    return finding


# --- reload → same logits --------------------------------------------------------------------------------------------


def check_reload(trained: TrainedHead, directory: Path) -> Finding:
    """Whether the files give, on random input, bit for bit the logits of the trained head in the same dtype."""
    exported = load_head(directory).head
    expected = probe(in_dtype(trained.head, DTYPES[trained.dtype]))
    if torch.equal(probe(exported), expected) and torch.equal(exported.draft_ids, trained.head.draft_ids):
        return Finding("reload", "ok", "The files give the same logits as the training checkpoint")
    return Finding("reload", "error", f"{directory} gives other logits than {trained.checkpoint}: export it again")


def in_dtype(head: DraftHead, dtype: torch.dtype) -> DraftHead:
    """A copy with weights in `dtype`; RoPE's frequencies stay in float32, as servers keep them."""
    copy = DraftHead(head.config, head.draft_ids)
    weights = {name: weight.to(dtype) for name, weight in head.named_parameters()}
    copy.load_state_dict(weights | {"draft_ids": head.draft_ids}, assign=True)
    return copy


@torch.no_grad()
def probe(head: DraftHead) -> Float[Tensor, "2 rows D"]:
    """Logits of two steps on fixed random input: every tensor and every option of the head has a part in them."""
    generator = torch.Generator().manual_seed(0)
    rows, hidden_size, dtype = 8, head.config.hidden_size, head.fc.weight.dtype
    embed = torch.randn(rows, hidden_size, generator=generator).to(dtype)
    hidden = head.fuse(torch.randn(rows, head.fc.in_features, generator=generator))
    logits = []
    for _ in range(2):
        hidden = outputs(head, hidden, embed)
        logits.append(head.logits(hidden))
        hidden = head.feedback(hidden)
    return torch.stack(logits)
