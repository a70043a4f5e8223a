"""A real Ray cluster of this machine's processes, in a network namespace of its own, whose workers are killed.

    python tests/ray_cluster.py --kills 50 --nodes 3 -- python precompute.py … workers=ray

Kills a random worker now and then while the command runs, takes a node away and adds one, kills the command itself once
and starts it again with another number of workers; prints what it did as JSON.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

# And an own /tmp/ray: there Ray notes the cluster that runs, which another test would else try to reach.
OWN = "mkdir -p /tmp/ray && mount -t tmpfs ray /tmp/ray && ip link set lo up"
OWN_NETWORK = ["unshare", "--map-root-user", "--net", "--mount", "sh", "-c", f'{OWN} && exec "$@"', "sh"]


def own_network_works() -> bool:
    """Say whether this machine lets us have a network namespace: Ray would open ports on every interface."""
    try:
        return subprocess.run([*OWN_NETWORK, "true"], capture_output=True).returncode == 0
    except OSError:
        return False


def find_actor_pids(pids: set[int]) -> Iterator[int]:
    """Yield the processes of Ray's actors among the descendants of `pids`."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            title = (folder / "cmdline").read_bytes()
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        if title.startswith(b"ray::Actor") and parent in pids:
            yield int(folder.name)


def has_ended(process: subprocess.Popen[bytes], *, within: float) -> bool:
    with suppress(subprocess.TimeoutExpired):
        process.wait(within)
    return process.returncode is not None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, required=True)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    from ray.cluster_utils import Cluster

    drawn, did = random.Random(0), {"kills": 0, "nodes_lost": 0, "nodes_added": 0, "driver_kills": 0}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    nodes = [cluster.add_node(num_cpus=1) for _ in range(options.nodes)]
    environment = {**os.environ, "RAY_ADDRESS": cluster.address, "PYTHONPATH": os.getcwd()}
    changes = {(options.kills + 2) // 4: "node", options.kills // 2 + 1: "driver"}
    process = subprocess.Popen(options.command, env=environment)
    while not has_ended(process, within=4 * drawn.uniform(0.5, 1.5)):
        raylets = {each.process.pid for node in nodes for each in node.all_processes["raylet"]}
        alive = sorted(find_actor_pids(raylets))
        if not alive or did["kills"] >= options.kills:
            continue
        os.kill(drawn.choice(alive), signal.SIGKILL)
        did["kills"] += 1
        change = changes.pop(did["kills"], None)
        if change == "node":
            cluster.remove_node(nodes.pop(0), allow_graceful=False)
            nodes.append(cluster.add_node(num_cpus=1))
            did["nodes_lost"], did["nodes_added"] = 1, 1
        if change == "driver":
            process.kill()
            process.wait()
            did["driver_kills"] = 1
            process = subprocess.Popen([*options.command, f"workers.count={options.nodes - 1}"], env=environment)
    print(json.dumps({**did, "status": process.returncode}))
    cluster.shutdown()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # Ray's threads
