"""Answers to conversations, and their features."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from eagle3.answers.rows import AnsweredRow
from eagle3.answers.store import AnswerCounts, AnswersManifest, MadeWith, file_seal
from eagle3.features.build import FeatureSettings, extract_features
from eagle3.features.manifest import Manifest
from eagle3.features.task import Sharding
from eagle3.storage.folder import open_folder
from eagle3.storage.records import sealed_bytes, sealed_line
from eagle3.target.identity import TargetIdentity
from eagle3.workers.in_process import InProcess
from eagle3.workers.task import WorkerId


def conversation(number: int, prompt: int, answer: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(5, 4000, (prompt + answer,), generator=generator).tolist()
    row = AnsweredRow(
        id=f"p{number}#0",
        prompt_id=f"p{number}",
        source="test",
        license="MIT",
        input_ids=ids,
        turns=[(prompt, prompt + answer)],
        last_of_prompt=True,
    )
    return asdict(row)


def write_answers(out_dir: Path, identity: TargetIdentity, rows: list[dict], *, complete: bool = True) -> None:
    (out_dir / "answers").mkdir(parents=True, exist_ok=True)
    path = out_dir / "answers" / "answers.jsonl"
    path.write_bytes(b"".join(map(sealed_line, rows)))
    counts = AnswerCounts(prompts=len(rows), rows=len(rows), turns=0, answer_tokens=0, finish_reasons={}, errors={})
    manifest = AnswersManifest(
        format_version=AnswersManifest.FORMAT_VERSION,
        target=identity,
        made_with=MadeWith(answers="huggingface", chat={}, sampling=None, seed=None, on_length=None),
        prompts_sha256="p",
        complete=complete,
        counts=counts,
        files={path.name: file_seal(path)},
    )
    (out_dir / "answers" / "manifest.json").write_bytes(sealed_bytes(manifest))


def extract_by(extractor: Any, target: Any, out_dir: Path, *, path: Any, shard_mb: float, **settings: Any) -> Manifest:
    """Let this process extract features of the answers in `out_dir`."""
    storage = open_folder(path or out_dir / "features", setting="features.path")

    @contextmanager
    def build(worker: WorkerId) -> Iterator[Sharding]:
        with extractor:
            yield Sharding(extractor, storage)

    return extract_features(
        target=target, settings=FeatureSettings(**settings), workers=InProcess(), build=build, out_dir=out_dir,
        storage=storage, shard_mb=shard_mb, window_tokens=1,
    )  # fmt: skip
