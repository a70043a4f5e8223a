"""What the heads of a sweep gain, kept in the folders of their jobs: only what is missing is measured."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from eagle3.decoding.paired import Gains
from eagle3.decoding.replay import Answered
from eagle3.decoding.speculate import load_speculator
from eagle3.head_files.files import read_files
from eagle3.serving.check.prompts import PromptSet
from eagle3.serving.compare.jobs import Job
from eagle3.serving.compare.measure import Gained, Measured, Way, answers_at, measure_head
from eagle3.serving.compare.run import head_facts
from eagle3.settings.serving import CompareRun, CompareSettings, TokenSampling
from eagle3.storage.files import sha256_json
from eagle3.storage.records import read_sealed_json, write_sealed_json
from eagle3.target.model import Target

log = logging.getLogger(__name__)


def measure_jobs(run: CompareRun, jobs: Sequence[Job], target: Target, prompts: PromptSet) -> dict[str, Gained]:
    """Return the gains of each job's head, by its name. Those that are kept are not measured again, unless the target
    now gives other answers: in bf16 another machine may."""
    identity = target.identity
    asked = {
        **{part: getattr(identity, part) for part in ("config_hash", "tokenizer_hash", "weights_hash")},
        "stop_ids": sorted(target.stop_ids),
        "dtype": str(target.embedding.dtype),
        "prompts": prompts.prompts,
        "conversations": prompts.conversations,
        "max_new_tokens": run.max_new_tokens,
        "seed": run.seed,
        **asdict(run.compare),
    }
    files = {job.name: _file(job, asked) for job in jobs}
    kept = {name: read_gains(file, run.compare) for name, file in files.items() if file.is_file()}
    log.info("%d of %d heads were measured before", len(kept), len(jobs))
    if len(kept) < len(jobs) or len({answers_sha256 for answers_sha256, _ in kept.values()}) > 1:
        answers = answers_at(target, prompts.prompts, run)
        given = sha256_json([[each.answer for each in answered] for answered in answers.values()])
        for job in jobs:
            if job.name not in kept or kept[job.name][0] != given:
                kept[job.name] = given, measure_job(job, target, answers, prompts.conversations, run.compare)
                write_gains(files[job.name], *kept[job.name])
    return {name: gained for name, (_, gained) in kept.items()}


def _file(job: Job, asked: dict[str, Any]) -> Path:
    """Return where the job's gains are kept; another head or question has another file."""
    key = sha256_json(asked | {"head": head_facts(job.head)["sha256"]})
    return job.folder / "compared" / f"{key[:16]}.json"


def measure_job(
    job: Job,
    target: Target,
    answers: Mapping[TokenSampling, Sequence[Answered]],
    conversations: Sequence[int],
    settings: CompareSettings,
) -> Gained:
    speculator = load_speculator(target, read_files(job.head))
    return measure_head(speculator, answers, conversations, settings, f"job {job.name}")


def write_gains(file: Path, answers_sha256: str, gained: Gained) -> None:
    """Write the gains of each way as lists, in the order of the ways."""
    lists = [
        {span: [[array.tolist() for array in gains] for gains in measured] for span, measured in spans.items()}
        for spans in gained.values()
    ]
    write_sealed_json(file, {"answers_sha256": answers_sha256, "gained": lists})


def read_gains(file: Path, settings: CompareSettings) -> tuple[str, Gained]:
    """Return the gains of each way, and the hash of the answers that they were measured on."""
    stored = read_sealed_json(file, made_by="the same comparison")
    ways = [Way(sampling, shape) for sampling in dict.fromkeys(settings.samplings) for shape in settings.drafts()]
    lists = [
        {span: Measured(*(Gains(*map(np.array, gains)) for gains in measured)) for span, measured in spans.items()}
        for spans in stored["gained"]
    ]
    return stored["answers_sha256"], dict(zip(ways, lists, strict=True))
