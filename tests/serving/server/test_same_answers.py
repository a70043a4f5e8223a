"""Which answers are compared with the plain server's, and what a server that answers otherwise looks like."""

import copy
from pathlib import Path

import pytest
from fitted_head import NEW_TOKENS, PROMPT, SMALL, make_target, small_target
from protocol_server import ProtocolServer, plain
from serving_fixtures import bench_settings, serving

from eagle3.serving.bench.loads import RESULTS, Plan, measure_running, read_results
from eagle3.serving.bench.stats import cells
from eagle3.serving.server.client import Answer
from eagle3.serving.server.load import Agreement, LoadResult
from eagle3.serving.server.same_answers import PlainAnswers

GREEDY = {"temperature": 0.0, "max_new_tokens": NEW_TOKENS}


def load(*answers: tuple[int, ...] | None) -> LoadResult:
    made = [Answer(error="HTTP 500") if ids is None else Answer(output_ids=ids) for ids in answers]
    return LoadResult(made, 1.0, cache_flushed=True)


def test_complete_answers_are_compared_with_the_plain_servers_first() -> None:
    known, prompts = PlainAnswers(GREEDY), [[1], [2], [1]]
    first = known.compared(load((5, 6), (7,), (5,)), prompts, plain=True)
    assert first.agreement == Agreement(0, 1)  # the first prompt, asked again
    assert known.compared(load((5, 6), (7,), (5, 6)), prompts, plain=True).agreement == Agreement(3, 3)
    assert known.compared(load((5, 6), None, (5, 7)), prompts, plain=False).agreement == Agreement(1, 2)
    assert known.compared(load((5, 6), (7, 8)), prompts[:2], plain=False).agreement == Agreement(1, 2)


def test_what_the_plain_server_did_not_answer_is_not_compared() -> None:
    known = PlainAnswers(GREEDY)
    assert known.compared(load((5,)), [[1]], plain=False).agreement == Agreement(0, 0)
    assert known.compared(load(None), [[1]], plain=True).agreement == Agreement(0, 0)
    assert known.compared(load((5,)), [[1]], plain=False).agreement == Agreement(0, 0)


def test_sampled_answers_are_not_compared() -> None:
    known = PlainAnswers(GREEDY | {"temperature": 0.7})
    for _ in range(2):
        assert known.compared(load((5,)), [[1]], plain=True).agreement == Agreement(0, 0)


@pytest.mark.parametrize("other, share", [(False, 1.0), (True, 0.0)], ids=["the same model", "another model"])
def test_a_server_that_answers_otherwise_is_seen(tmp_path: Path, other: bool, share: float) -> None:
    another = copy.deepcopy(SMALL)
    another.intermediate_size += 8
    targets = small_target(), make_target(another) if other else small_target()
    servers = [ProtocolServer(plain(target), {"max_running_requests": 8}) for target in targets]
    settings = {"concurrency": [2], "requests_per_place": 1, "repeats": 2, "warmup": 0}
    with serving(servers[0]) as plain_url, serving(servers[1]) as head_url:
        plan = Plan(
            bench_settings(**settings, plain_url=plain_url, head_url=head_url), {"chat": [PROMPT, PROMPT[:9]]}, GREEDY
        )
        measure_running(plan, tmp_path, {})
    [cell] = cells(read_results(tmp_path / RESULTS))
    assert cell.sides["plain"].same_answers == 1.0
    assert cell.sides["head"].same_answers == share
