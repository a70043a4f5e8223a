"""`action=compare`: from exported heads to a table of their differences."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eagle3.decoding.speculate import Speculator
from eagle3.head_files.files import read_without_weights
from eagle3.head_files.format import load_head
from eagle3.serving.check.prompts import PromptSet
from eagle3.serving.compare.heads import require_own_target
from eagle3.serving.compare.measure import Answers, BatchedDecoder, Measured, Way, all_ways
from eagle3.serving.compare.report import require_verified, rows, table
from eagle3.serving.report import write_report
from eagle3.settings.serving import CompareSettings
from eagle3.storage.files import sha256_file, sha256_json
from eagle3.target.model import Target

log = logging.getLogger(__name__)


def compare(
    settings: CompareSettings,
    folders: Sequence[Path],
    target: Target,
    prompts: PromptSet,
    *,
    max_new_tokens: int,
    seed: int,
    origin: Mapping[str, Any],
    folder: Path,
) -> None:
    """Print the table; compare.json and compare.md go to `folder`. `origin` goes into the first: commit, command,
    machine, versions."""
    for head in folders:
        require_own_target(read_without_weights(head), target.identity, ["weights_hash"])
    decoder = BatchedDecoder(target, settings, Answers(prompts.prompts, max_new_tokens, seed))
    ways = all_ways(settings)
    measured: dict[str, dict[Way, Measured]] = {}
    seconds: dict[str, float] = {}
    layers, dtype = len(target.layers), target.embedding.dtype
    # All before the first decodes for long: a head that cannot be decoded ends the run here.
    heads = {name: load_head(path, num_layers=layers, dtype=dtype) for name, path in names(folders).items()}
    for name in [*heads]:
        start, loaded = time.perf_counter(), heads.pop(name)
        measured[name] = decoder(Speculator(target, loaded.head, loaded.capture_layers), ways, name)
        seconds[name] = time.perf_counter() - start
    require_verified(measured)
    found = rows(measured, prompts.sources)
    conditions = {
        "target": target.path,
        "dtype": str(target.embedding.dtype).removeprefix("torch."),
        "heads": {name: facts_of(path) for name, path in names(folders).items()},
        "prompts": len(prompts.prompts),
        "prompts_from": prompts.origin,
        "prompts_hash": sha256_json(prompts.prompts),
        "left_out": dict(prompts.left_out),
        "max_new_tokens": max_new_tokens,
        "seed": seed,
        **asdict(settings),
        "seconds": {"answers": decoder.seconds, "heads": seconds},
    }
    page = table(found)
    if settings.draft_window is not None:
        page = f"compare.draft_window={settings.draft_window}\n\n{page}"
    write_report(folder / "compare.json", {**origin, **conditions, "rows": found}, folder / "compare.md", page)
    print(page)
    log.info("the table is in %s, all numbers are in %s", folder / "compare.md", folder / "compare.json")


def names(folders: Sequence[Path]) -> dict[str, Path]:
    """Return the folders by their last parts, or by their whole paths where two end alike."""
    short = [folder.name for folder in folders]
    alike = len(set(short)) < len(short) or "" in short
    return {str(folder) if alike else folder.name: folder for folder in folders}


def facts_of(head: Path) -> dict[str, Any]:
    weights = {path.name: sha256_file(path) for path in sorted(head.glob("*.safetensors"))}
    return {"path": str(head), "sha256": weights}
