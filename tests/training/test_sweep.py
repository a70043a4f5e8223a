"""The ranked table of a sweep."""

from pathlib import Path

from eagle3.storage.records import write_sealed_json
from eagle3.training.sweep import ranked_table

METRIC = "val/served_accept_length_3"


def job(directory: Path, name: str, overrides: list[str], score: float | None, mode: str = "max") -> None:
    (directory / name / ".hydra").mkdir(parents=True)
    (directory / name / ".hydra" / "overrides.yaml").write_text("".join(f"- {item}\n" for item in overrides))
    if score is not None:
        result = {"metric": METRIC, "mode": mode, "score": score, "checkpoint": "c", "steps": 12, "epochs": 1}
        write_sealed_json(directory / name / "result.json", result)


def test_jobs_are_ranked_by_accept_length_and_failed_ones_come_last(tmp_path: Path) -> None:
    for number, (lr, decay, result) in enumerate([("1e-4", 0.8, 1.25), ("3e-4", 0.8, None), ("3e-4", 1.0, 1.5)]):
        job(tmp_path, str(number), ["data.path=x", f"optim.lr={lr}", f"loss.decay={decay}"], result)
    lines = ranked_table(tmp_path).splitlines()[1:]
    assert [line.split()[0] for line in lines] == ["1", "2", "3"]
    assert ["1.5000" in lines[0], "1.2500" in lines[1], "no result" in lines[2]] == [True] * 3
    assert lines[0].endswith("  optim.lr=3e-4 loss.decay=1.0")


def test_of_a_metric_that_shall_be_small_the_smallest_is_first(tmp_path: Path) -> None:
    for number, loss in enumerate([2.5, None, 0.5]):
        job(tmp_path, str(number), [f"seed={number}"], loss, mode="min")
    lines = ranked_table(tmp_path).splitlines()[1:]
    assert [line.split()[-1] for line in lines] == ["seed=2", "seed=0", "seed=1"]


def test_a_folder_without_jobs_says_so(tmp_path: Path) -> None:
    assert "holds no job of a sweep" in ranked_table(tmp_path)
