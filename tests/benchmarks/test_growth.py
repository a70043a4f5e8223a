"""The growth of a step's cost is what train_step.py measured, as one result."""

from typing import Any

import pytest
from stores import ROOT


def measured(hidden_size: int, *cases: tuple[int, int, float], commit: str = "a", **others: Any) -> dict[str, Any]:
    keys = ("tokens", "documents", "answer_share")
    rows = [{"hidden_size": hidden_size, "tokens_per_s": 1} | dict(zip(keys, case, strict=True)) for case in cases]
    facts = {"date": "2026-11-27", "commit": commit, "machine": "one GPU", "versions": "some"}
    return facts | {"command": "python train_step.py", "rows": rows} | others


def test_results_of_one_machine_become_ascending_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import growth

    monkeypatch.setattr(growth, "KEPT", ("hidden_size", "tokens", "document_tokens", "answer_share", "tokens_per_s"))
    usual = (16384, 16, 0.5)
    did_not_fit = measured(16384, usual)
    did_not_fit["rows"][0]["tokens_per_s"] = None
    parts = [
        measured(8192, usual, command="python train_step.py --head 70b --out here.json"),
        measured(4096, usual, (16384, 16, 1), (16384, 16, 0.1), (32768, 1, 0.5), (32768, 64, 0.5)),
        measured(576, usual),
        measured(576, usual, command="python train_step.py kernels.cuda_graphs=false"),
        did_not_fit,
    ]
    result = growth.merged(parts)
    assert [row["hidden_size"] for row in result["hidden_size"]] == [576, 4096, 8192]
    assert [row["document_tokens"] for row in result["document_tokens"]] == [512, 32768]
    assert [row["answer_share"] for row in result["answer_share"]] == [0.1, 0.5, 1]
    assert [row["hidden_size"] for row in result["without_cuda_graphs"]] == [576]
    assert result["command"].startswith("python train_step.py --head 70b --out FILE; ")
    with pytest.raises(AssertionError, match="several commits"):
        growth.merged([*parts, measured(2048, usual, commit="b")])
