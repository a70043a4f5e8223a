"""Which answers are compared with the plain server's, and what a server that answers otherwise looks like."""

import copy

import pytest
from fitted_head import SMALL, make_target, small_target
from protocol_server import ProtocolServer, plain
from serving_fixtures import serving
from small_servers import GREEDY, PROMPTS, load

from eagle3.engine.timed import ServedAnswer
from eagle3.serving.server.load import Agreement, LoadResult, PlainAnswers


def made(*answers: tuple[int, ...] | None) -> LoadResult:
    served = [ServedAnswer(error="HTTP 500") if ids is None else ServedAnswer(output_ids=ids) for ids in answers]
    return LoadResult(served, 1.0, cache_flushed=True)


def test_complete_answers_are_compared_with_the_plain_servers_first() -> None:
    known, prompts = PlainAnswers(GREEDY), [[1], [2], [1]]
    first = known.compared(made((5, 6), (7,), (5,)), prompts, plain=True)
    assert first.agreement == Agreement(0, 1)  # the first prompt, asked again
    assert known.compared(made((5, 6), (7,), (5, 6)), prompts, plain=True).agreement == Agreement(3, 3)
    assert known.compared(made((5, 6), None, (5, 7)), prompts, plain=False).agreement == Agreement(1, 2)
    assert known.compared(made((5, 6), (7, 8)), prompts[:2], plain=False).agreement == Agreement(1, 2)


def test_what_the_plain_server_did_not_answer_is_not_compared() -> None:
    known = PlainAnswers(GREEDY)
    assert known.compared(made((5,)), [[1]], plain=False).agreement == Agreement(0, 0)
    assert known.compared(made(None), [[1]], plain=True).agreement == Agreement(0, 0)
    assert known.compared(made((5,)), [[1]], plain=False).agreement == Agreement(0, 0)


def test_sampled_answers_are_not_compared() -> None:
    known = PlainAnswers(GREEDY | {"temperature": 0.7})
    for _ in range(2):
        assert known.compared(made((5,)), [[1]], plain=True).agreement == Agreement(0, 0)


@pytest.mark.parametrize("other, same", [(False, 2), (True, 0)], ids=["the same model", "another model"])
def test_a_server_that_answers_otherwise_is_seen(other: bool, same: int) -> None:
    another = copy.deepcopy(SMALL)
    another.intermediate_size += 8
    targets = small_target(), make_target(another) if other else small_target()
    known, agreements = PlainAnswers(GREEDY), []
    for number, target in enumerate((targets[0], *targets)):
        with serving(ProtocolServer(plain(target), {})) as url:
            result = load(url, PROMPTS[:2])
        agreements.append(known.compared(result, PROMPTS[:2], plain=number < 2).agreement)
    assert agreements == [Agreement(0, 0), Agreement(2, 2), Agreement(same, 2)]
