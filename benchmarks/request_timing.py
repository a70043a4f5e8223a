"""The rate of a server that reads new prompts between two steps of all answers, by when the client sends requests.

The real client asks a simulated scheduler, in simulated time: a minute on a CPU.
"""

import argparse
import asyncio
import random
import selectors
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from result import write_result

from eagle3.answers import served
from eagle3.answers.served import ServedAnswerer
from eagle3.compose import compose_run
from eagle3.engine.endpoint import Answer, Request
from eagle3.engine.pool import Pool
from eagle3.settings.precomputing import Sampling, ServedSettings
from eagle3.workers.meter import ProgressBuffer
from eagle3.workers.task import take_from

WARM_UP, REST = 0.15, 0.3  # shares of the conversations before and after what is counted


@dataclass(frozen=True)
class Timing:
    """Seconds of a server. The defaults are fitted to the two rates that answer_refills.json measured."""

    step: float = 0.014  # one token for each request that runs
    read: float = 0.025  # of new prompts, together
    receive: float = 0.0015  # of one request, one after the other
    running: int = 512  # requests at a time


FEW = Timing(step=0.005, running=32)
# Mean tokens of the answers of a conversation: one; a shorter one; a prompt that the target writes and its answer.
ONE, SHORT, TWO = (260,), (127,), (95, 160)
AT_ONCE, WAITS = 0.0001, (0.1, 0.25, 0.5)  # further requests leave at multiples of this


class SkippingSelector(selectors.SelectSelector):
    """Skips the time in which nothing is due."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now += timeout or 0
        return super().select(0)


class SimulatedLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.selector = SkippingSelector()
        super().__init__(self.selector)

    def time(self) -> float:
        return self.selector.now


class Scheduler:
    """An endpoint that answers as slowly as a server would."""

    url = "http://simulated"

    def __init__(self, timing: Timing) -> None:
        self.timing, self.receiving = timing, asyncio.Lock()
        self.queue: list[tuple[asyncio.Future[None], int]] = []
        self.running: dict[asyncio.Future[None], int] = {}
        self.tokens = self.reads = self.prompts = 0

    async def complete(self, session: object, request: Request) -> Answer:
        async with self.receiving:
            await asyncio.sleep(self.timing.receive)
        done = asyncio.get_running_loop().create_future()
        self.queue.append((done, request.max_new_tokens))
        await done
        return Answer([0], "stop")

    async def run(self) -> None:
        while True:
            free = self.timing.running - len(self.running)
            if self.queue and free:
                new, self.queue = self.queue[:free], self.queue[free:]
                await asyncio.sleep(self.timing.read)
                self.reads, self.prompts = self.reads + 1, self.prompts + len(new)
                self.running |= new
            await asyncio.sleep(self.timing.step if self.running else self.timing.receive)
            self.tokens += len(self.running)
            for done, left in [*self.running.items()]:
                self.running[done] = left - 1
                if left == 1:
                    del self.running[done]
                    done.set_result(None)


class Talk:
    """A conversation as an answerer sees it."""

    prompt_ids, seed, stop_ids = (0,), 0, None

    def __init__(self, lengths: tuple[int, ...], rng: random.Random) -> None:
        self.lengths = [min(512, max(8, round(rng.expovariate(1 / mean)))) for mean in lengths]

    @property
    def waiting(self) -> bool:
        return bool(self.lengths)

    @property
    def sampling(self) -> Sampling:
        return Sampling(temperature=0, top_p=1, top_k=0, max_new_tokens=self.lengths[0])

    def answer(self, answer: Answer) -> None:
        del self.lengths[0]


class Client(ServedAnswerer):
    """The answerer, connected to a simulated server."""

    def __init__(self, in_flight: int, timing: Timing, runner: asyncio.Runner) -> None:
        run = compose_run("precompute", "out_dir=DIR", "answers=sglang", f"answers.in_flight={in_flight}")
        self.settings, self.runner, self.scheduler = run.answers.read(ServedSettings), runner, Scheduler(timing)
        limits = {key: getattr(self.settings, key) for key in ("in_flight", "attempts", "give_up_s")}
        self.pool: Any = Pool[Any]([self.scheduler], None, setting="answers", **limits)  # type: ignore[arg-type]

    def _request(self, prompt_ids: Any, seed: int, sampling: Any, stop_ids: Any = None) -> Request:
        return Request(list(prompt_ids), seed, **asdict(sampling))


def measure(
    talks: int, lengths: tuple[int, ...], in_flight: int, wait: float, timing: Timing = Timing()
) -> dict[str, Any]:
    """Return the rates between the first 15 % of the conversations and the last 30 %."""
    rng, ended, marks = random.Random(0), 0, list[tuple[float, int, int, int]]()
    served.ASKED_EVERY_S = wait
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        client = Client(in_flight, timing, runner)
        server, loop = client.scheduler, runner.get_loop()
        steps = loop.create_task(server.run())
        conversations: Any = [Talk(lengths, rng) for _ in range(talks)]
        for finished in client(take_from(conversations), ProgressBuffer()):
            ended += len(finished)
            if len(marks) < 2 and ended >= talks * (1 - REST if marks else WARM_UP):
                marks.append((loop.time(), server.tokens, server.reads, server.prompts))
        steps.cancel()
    seconds, tokens, reads, prompts = (after - before for before, after in zip(*marks, strict=True))
    case = {"tokens_of_answers": lengths, "in_flight": in_flight, "asked_every_s": wait, "running": timing.running}
    return case | {"tokens_per_s": round(tokens / seconds), "prompts_a_read": round(prompts / reads, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--talks", type=int, default=6000, help="conversations of each case")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    talks, few = arguments.talks, arguments.talks // 10
    cases = [
        *((talks, lengths, in_flight, AT_ONCE) for lengths in (ONE, SHORT, TWO) for in_flight in (512, 640)),
        *((talks, TWO, 512, wait) for wait in WAITS),
        *((few, TWO, 32, wait, FEW) for wait in (AT_ONCE, *WAITS)),
    ]
    rows = []
    for case in cases:
        rows.append(measure(*case))
        print(rows[-1], flush=True)
    write_result(arguments.out, {"timing": asdict(Timing()), "timing_of_32": asdict(FEW), "cases": rows})


if __name__ == "__main__":
    main()
