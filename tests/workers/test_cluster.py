"""A real Ray cluster answers and extracts what one process does, whatever is killed meanwhile.

KILLS=50 ROWS=1500 python -m pytest tests/workers/test_cluster.py    # the long form; by default a short one
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ray_cluster import OWN_NETWORK, own_network_works
from scripts import finished
from stores import ASSETS, ROOT, assert_same_samples, open_store

from eagle3.storage.files import read_jsonl

KILLS, ROWS = int(os.environ.get("KILLS", "3")), int(os.environ.get("ROWS", "30"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not own_network_works(), reason="no network namespace can be made: Ray would open ports"),
    pytest.mark.timeout(3600),
]


def settings(folder: Path, out_dir: Path) -> list[str]:
    return [
        f"target.path={ASSETS}/tiny", "target.device=cpu", f"prompts.path={folder}/prompts.jsonl", f"out_dir={out_dir}",
        "prompts/privacy=patterns", "sampling.max_new_tokens=24",
        "answers=huggingface", "answers.window=8", "features.batch_tokens=64",
        "features.shard_mb=0.3", "features.dtype=bfloat16",
    ]  # fmt: skip


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    return subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cluster")
    lines = (ASSETS / "prompts" / "train.jsonl").read_text().splitlines(keepends=True)[:ROWS]
    (folder / "prompts.jsonl").write_text("".join(lines))
    finished("precompute", *settings(folder, folder / "here"))
    return folder


def test_a_cluster_whose_workers_die_makes_the_store_of_one_process(folder):
    command = [sys.executable, "precompute.py", *settings(folder, folder / "ray"), "workers=ray", "workers.restarts=99"]
    cluster = [sys.executable, "tests/ray_cluster.py", f"--kills={KILLS}", "--nodes=2", "--", *command]
    done = run([*OWN_NETWORK, *cluster])
    did = json.loads(done.stdout.splitlines()[-1])
    print(did)
    assert did["status"] == 0, done.stderr
    assert (did["kills"], did["nodes_lost"], did["nodes_added"], did["driver_kills"]) == (KILLS, 1, 1, 1)
    here, there = (
        {row["id"]: row for row in read_jsonl(folder / name / "answers/answers.jsonl")} for name in ("here", "ray")
    )
    assert [{**row, "last_of_prompt": None, "seal": None} for row in here.values()] == [
        {**there[name], "last_of_prompt": None, "seal": None} for name in here
    ]
    one, other = (open_store(folder / name / "features") for name in ("here", "ray"))
    other.verify()
    assert other.manifest.samples == len(other.samples)
    assert_same_samples(one, other, tolerance=2e-2)  # bf16


NOTED = "echo 127.0.0.1:1 > /tmp/ray/ray_current_cluster"  # as a cluster that was killed leaves it
ONE_WORKER = """
import logging, os, signal, sys, time
from contextlib import nullcontext
from pathlib import Path
from eagle3.errors import InputError
from eagle3.interrupts import end_like_ctrl_c
from eagle3.workers.cluster import RayPool, connect
from eagle3.workers.driver import Driver
from eagle3.workers.meter import ProgressBuffer
logging.basicConfig(stream=sys.stdout, format="%(message)s")
signal.signal(signal.SIGTERM, end_like_ctrl_c)
connect(None)
pool = RayPool(nullcontext, count=1, resources={"CPU": 1}, logs=Path(sys.argv[1]))
try:
    list(Driver(pool, [(0, 0)], ProgressBuffer(), ahead=1, total=1, restarts=0).results())
except InputError as error:
    print(error, flush=True)
try:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
except KeyboardInterrupt:
    print("as by Ctrl-C")
"""


def test_a_cluster_that_is_gone_is_replaced_a_log_that_cannot_be_written_is_named_and_sigterm_is_ctrl_c(tmp_path):
    (tmp_path / "worker-0.log").mkdir()
    command = ["sh", "-c", f'{NOTED} && exec "$@"', "sh", sys.executable, "-c", ONE_WORKER, str(tmp_path)]
    done = run([*OWN_NETWORK, *command])
    assert done.returncode == 0, done.stderr
    gone, failed, ended = done.stdout.splitlines()
    assert gone.startswith("the last Ray cluster of this machine, at 127.0.0.1:1, is gone")
    assert "worker 0 on an unknown node: it cannot start (IsADirectoryError: " in failed
    assert ended == "as by Ctrl-C"
