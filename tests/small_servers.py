"""Two servers that really decode, with and without a head, and loads for them."""

from functools import cache
from typing import Any

from exported_head import tiny_chat
from fitted_head import LAYERS, PROMPT, TREE, fitted_head, small_target
from protocol_server import ProtocolServer, plain, speculative
from serving_fixtures import bench_settings

from eagle3.serving.bench.loads import BenchPlan
from eagle3.serving.check.turns import Turn
from eagle3.serving.server.load import LoadResult, measure_load

PROMPTS = [PROMPT[:length] for length in range(5, 13)]
NEW_TOKENS = 8
GREEDY = {"temperature": 0.0, "max_new_tokens": NEW_TOKENS}
FACTS = {"command": "serve.py action=bench", "machine": {"gpus": ["a GPU"]}}


def alone(prompt_ids: list[int]) -> Turn:
    """A conversation of one turn."""
    return Turn(prompt_ids, tiny_chat(), [], [], len(prompt_ids))


SETS = {"chat": [*map(alone, [PROMPT, PROMPT[:9], PROMPT[:7]])], "code": [alone(PROMPT[:5])]}


def plan(**changes: Any) -> BenchPlan:
    settings = bench_settings(concurrency=[1, 2], requests_per_place=2, repeats=2, warmup=0, **changes)
    return BenchPlan(settings, SETS, "all", GREEDY)


@cache
def small_head() -> Any:
    return fitted_head(small_target(), PROMPT)


def load(url: str, prompts: list[list[int]] = PROMPTS, **changes: Any) -> LoadResult:
    settings = {"concurrency": 3, "sampling": GREEDY, "warmup": 0, "timeout_s": 600, "progress": None}
    return measure_load(url, [*map(alone, prompts)], **settings | changes)


def plain_server() -> ProtocolServer:
    return ProtocolServer(plain(small_target()), {"max_running_requests": 64})


def head_server() -> ProtocolServer:
    arguments = {"speculative_algorithm": "EAGLE3", "max_running_requests": 1, "disable_overlap_schedule": True}
    return ProtocolServer(speculative(small_target(), small_head(), LAYERS, **TREE), arguments)
