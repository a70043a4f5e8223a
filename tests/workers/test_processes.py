"""Workers in processes: every item has one result, whoever is killed, refused or broken meanwhile."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from stores import ROOT
from worker_tasks import Squares

from eagle3.errors import InputError
from eagle3.workers.here import Here
from eagle3.workers.meter import Meter, Tally
from eagle3.workers.processes import Processes
from eagle3.workers.task import Keyed

ITEMS: list[Keyed] = [(f"item {number}", number) for number in range(200)]


def squares(
    tmp_path: Path, task: Squares, *, count: int = 3, restarts: int = 20, ahead: int = 10, total: int | None = 200
) -> tuple[dict[str, int], Counter[int], Tally]:
    """Return the results, how many each process gave, and what progress was told."""
    told = Tally()
    workers = Processes(count=count, gpus=0, restarts=restarts, logs=tmp_path)
    given = [pair for some in workers(task, iter(ITEMS), told, ahead=ahead, total=total) for pair in some]
    assert {*Counter(key for key, _ in given).values()} == {1}
    return {str(key): square for key, (square, _) in given}, Counter(pid for _, (_, pid) in given), told


EXPECTED = {f"item {number}": number * number for number in range(200)}


def test_every_worker_does_a_share(tmp_path: Path) -> None:
    results, by, told = squares(tmp_path, Squares(seconds=0.01))
    assert results == EXPECTED and (told.ended, told.tokens) == (200, 2000)
    assert len(by) == 3 and min(by.values()) > 20


def test_this_process_alone_gives_the_same() -> None:
    told = Tally()
    given = [pair for some in Here()(Squares(), iter(ITEMS), told, ahead=1) for pair in some]
    assert {key: square for key, (square, _) in given} == EXPECTED and told.ended == 200


def test_what_killed_workers_held_is_done_by_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    results, by, told = squares(tmp_path, Squares(dies=0.1), restarts=1000)
    assert results == EXPECTED and told.ended == 200
    assert len(by) > 3 and "was lost with" in caplog.text


def test_a_worker_that_cannot_start_is_named_and_the_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    results, by, _ = squares(tmp_path, Squares(refused=frozenset([1]), seconds=0.02))
    assert results == EXPECTED and len(by) == 2
    assert "worker 1 on" in caplog.text and "there is no target here; the other 2 go on" in caplog.text


def test_workers_that_all_cannot_start_end_the_run_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"workers: none is left \(worker \d on .*: there is no target here\)"):
        squares(tmp_path, Squares(refused=frozenset(range(3))))


def test_a_fault_of_the_task_is_named_and_its_traceback_is_in_the_log(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none is left \(worker \d on .*: ZeroDivisionError: by a test\)"):
        squares(tmp_path, Squares(broken=150))
    assert any("Traceback" in path.read_text() for path in tmp_path.glob("worker-*.log"))


def test_a_worker_that_is_always_lost_is_given_up(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"3 times without a result: workers\.restarts=2"):
        squares(tmp_path, Squares(dies=1.0), restarts=2, count=1)


def test_a_driver_that_is_killed_leaves_no_worker_behind(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path[:0] = ['tests']\n"
        "from pathlib import Path; from worker_tasks import Squares\n"
        "from eagle3.workers.processes import Processes; from eagle3.workers.meter import Tally\n"
        "if __name__ == '__main__':\n"
        f"    workers = Processes(count=2, gpus=0, restarts=0, logs=Path({str(tmp_path)!r}))\n"
        "    for some in workers(Squares(seconds=0.05), enumerate(range(10**6)), Tally(), ahead=5):\n"
        "        print(some[0][1][1], flush=True)\n"
    )
    path = tmp_path / "drive.py"
    path.write_text(code)
    driver = subprocess.Popen(
        [sys.executable, str(path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert driver.stdout is not None
    pids = set()
    while len(pids) < 2:
        pids.add(int(driver.stdout.readline()))
    driver.send_signal(signal.SIGKILL)
    driver.communicate()
    while any(Path(f"/proc/{pid}").exists() for pid in pids):  # for ever, if one stays
        time.sleep(0.1)


@pytest.mark.parametrize(("count", "gpus"), [(None, 0), (2, 1), (None, 1)])
def test_a_machine_without_so_many_gpus_is_one_line(tmp_path: Path, count: int | None, gpus: int) -> None:
    with pytest.raises(InputError, match=r"workers\.count="):
        Processes(count=count, gpus=gpus, restarts=0, logs=tmp_path)


def test_the_bar_counts_what_a_lost_worker_had_done_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    workers = Processes(count=2, gpus=0, restarts=1000, logs=tmp_path)
    with Meter(200, desc="squares", unit="number", of="tokens") as meter:
        for _ in workers(Squares(dies=0.03), iter(ITEMS), meter, ahead=10, total=200):
            pass
        assert meter.bar.n == 200
    assert meter.note.endswith(" of 2 workers")
