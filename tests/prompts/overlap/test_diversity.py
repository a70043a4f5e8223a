"""Prompts that mean alike: embeddings against one forward each, the choice against an obvious loop, the counts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from prompt_stage import Prepare, chat, default_settings, prepare, reasons, write
from transformers import AutoModel, AutoTokenizer

from eagle3.errors import InputError
from eagle3.prompts.overlap.diversity import Diversity, Encoder, members_of

__all__ = ["prepare"]

SETTINGS = {
    "clusters": 3,
    "per_cluster": 2,
    "similarity": None,
    "max_tokens": 64,
    "batch_size": 4,
    "device": "cpu",
    "seed": 0,
}
TEXTS = ["What is a list?", "Sort these numbers: 3, 1, 2, please.", "Write a poem about the sea and the wind.", "Hi"]


def diversity(tiny_path: Path, **changes: Any) -> Diversity:
    return Diversity(**{"path": str(tiny_path), **SETTINGS, **changes})


def test_an_embedding_is_the_mean_of_the_last_hidden_states_whatever_lies_beside_it(tiny_path: Path) -> None:
    model = AutoModel.from_pretrained(tiny_path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny_path)
    found = Encoder(tiny_path, max_tokens=8, device="cpu")(TEXTS)
    for text, row in zip(TEXTS, found, strict=True):
        ids = tokenizer(text, truncation=True, max_length=8)["input_ids"]
        with torch.inference_mode():
            mean = model(input_ids=torch.tensor([ids])).last_hidden_state[0].float().mean(dim=0)
        assert row == pytest.approx((mean / mean.norm()).numpy(), abs=1e-5)


def test_a_text_without_tokens_has_an_embedding_of_zeros(tiny_path: Path) -> None:
    encoder = Encoder(tiny_path, max_tokens=8, device="cpu")
    assert np.isfinite(encoder(["", "Hi"])).all()


def obvious(group: np.ndarray, similarity: float | None, room: int | None) -> tuple[list[int], list[int]]:
    kept: list[int] = []
    similar: list[int] = []
    for place, row in enumerate(group):
        if similarity is not None and any(float(row @ group[other]) >= similarity for other in kept):
            similar.append(place)
        elif room is None or len(kept) < room:
            kept.append(place)
    return kept, similar


@pytest.mark.parametrize(("similarity", "room"), [(None, 5), (0.8, None), (0.8, 7), (0.95, 3), (0.3, 1)])
@pytest.mark.parametrize("compared", [1, 7, 1024])
def test_the_choice_is_that_of_an_obvious_loop(
    tiny_path: Path, similarity: float | None, room: int | None, compared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle3.prompts.overlap.diversity.COMPARED", compared)
    draw = np.random.default_rng(0)
    group = draw.normal(size=(60, 4)).astype(np.float32)
    group /= np.linalg.norm(group, axis=1, keepdims=True)
    kept, similar = diversity(tiny_path, similarity=similarity, per_cluster=room)._choose(group)
    assert ([*np.flatnonzero(kept)], [*np.flatnonzero(similar)]) == obvious(group, similarity, room)


def test_groups_are_those_of_points_that_lie_together(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle3.prompts.overlap.diversity.READ", 64)  # in parts
    draw = np.random.default_rng(1)
    centres = np.eye(3, 8)[draw.integers(0, 3, 500)]
    points = (centres + draw.normal(scale=0.05, size=centres.shape)).astype(np.float16)
    groups = diversity(tiny_path)._group(points)
    assert len({(group, int(centre.argmax())) for group, centre in zip(groups, centres, strict=True)}) == 3
    members = [*members_of(groups)]
    assert sorted(np.concatenate(members)) == [*range(500)] and all((np.diff(each) > 0).all() for each in members)
    assert (groups == diversity(tiny_path)._group(points)).all()


def test_fewer_prompts_than_groups_are_all_kept(tiny_path: Path) -> None:
    assert [*diversity(tiny_path, clusters=8)._group(np.eye(5, dtype=np.float16))] == [*range(5)]


def test_the_stage_keeps_the_first_of_what_means_alike_and_counts_the_others(prepare: Prepare, tiny_path: Path) -> None:
    pytest.importorskip("sklearn")
    rows = [chat(f"How many apples are {number} apples and {number} more?") for number in range(12)]
    rows += [chat(f"def f{number}(x):\n    return x + {number}") for number in range(12)]
    settings = {"diversity": {"path": str(tiny_path), **SETTINGS, "clusters": 2, "per_cluster": 5}}
    near = {"duplicates": {"near": False}}
    ledger = prepare(rows, **settings, **near)
    assert reasons(prepare) == ["past the cap of those that mean alike"] * 14
    assert ledger["prompts"] == 10
    ids = [row["messages"][0]["content"] for row in prepare.prompts()]
    assert ids == [turn["messages"][0]["content"] for turn in [*rows[:5], *rows[12:17]]]
    alike = {"diversity": {**settings["diversity"], "per_cluster": None, "similarity": 0.5}}
    prepare(rows, **alike, **near)
    assert set(reasons(prepare)) == {"means the same as another"}


def test_a_limit_takes_of_what_diversity_leaves_of_all_rows(prepare: Prepare, tiny_path: Path) -> None:
    rows = [chat(f"How many apples are {number} apples and {number} more?") for number in range(40)]
    rows += [chat(f"def f{number}(x):\n    return x + {number}") for number in range(40)]
    settings = {"diversity": {"path": str(tiny_path), **SETTINGS, "clusters": 2, "per_cluster": 3}}
    ledger = prepare(rows, **settings, duplicates={"near": False}, limit=5, chunk_mb=0.001)
    assert ledger["rows"] == 80 and ledger["prompts"] == 5
    texts = [row["messages"][0]["content"] for row in prepare.prompts()]
    assert [text.startswith("def") for text in texts] == [False] * 3 + [True] * 2


def test_a_sources_limit_that_diversity_undercuts_reads_no_more_of_it(prepare: Prepare, tiny_path: Path) -> None:
    rows = [chat(f"How many apples are {number} apples and {number} more?") for number in range(200)]
    settings = {"diversity": {"path": str(tiny_path), **SETTINGS, "clusters": 2, "per_cluster": 3}}
    source = {"path": str(write(prepare.root / "apples.jsonl", rows)), "license": "MIT", "limit": 20}
    ledger = prepare(sources=[source], **settings, duplicates={"near": False}, chunk_mb=0.001, processes=1)
    assert ledger["prompts"] <= 6 and 20 <= ledger["rows"] < 60


def test_it_is_off_by_default(prepare: Prepare) -> None:
    assert default_settings()["diversity"]["path"] is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="a case is of machines without a GPU")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"per_cluster": None}, r"prompts\.diversity\.path=.*: without per_cluster and similarity nothing is left out"),
        ({"path": "/nowhere"}, r"prompts\.diversity\.path=/nowhere holds no config\.json; give the local folder"),
        ({"device": "cuda"}, r"prompts\.diversity\.device=cuda: PyTorch sees no GPU here; set cpu, or auto"),
    ],
)
def test_what_cannot_work_is_said_before_any_row(tiny_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        diversity(tiny_path, **changes)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config.json": "{}"}, r"holds no tokenizer\*"),
        ({"config.json": "{}", "tokenizer.json": ""}, r"holds no \*\.safetensors"),
        (
            {"config.json": "{}", "tokenizer.json": "", "model.safetensors": ""},
            "is of no model that transformers knows",
        ),
    ],
)
def test_a_folder_that_is_no_model_is_refused_before_any_row(
    tmp_path: Path, files: dict[str, str], message: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=message):
        diversity(tmp_path)
