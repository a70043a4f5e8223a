"""How full the clients keep an SGLang server, at Llama-3.1-8B's shape on one GPU: answers and captured features, each
next to the same requests sent in one offline batch to the same server.

    python benchmarks/engine_rates.py --work DIR --out RESULT.json --launch '{"python": "python3", "env": {…}}'

The weights are random: rates do not depend on them, acceptance would.
"""

import argparse
import asyncio
import json
import random
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from result import ROOT, write_result
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from eagle3.adapters.quiet import quiet_libraries
from eagle3.answers.chat import Chat
from eagle3.answers.served import ServedAnswerer
from eagle3.compose import compose_run
from eagle3.engine.client import ask, new_session
from eagle3.engine.endpoint import Answer
from eagle3.engine.local_servers import build_servers, serving
from eagle3.features.capture_check import plain_sentinels
from eagle3.features.conversation import Conversation
from eagle3.features.served import ServedExtractor
from eagle3.settings.engine import LaunchSettings
from eagle3.settings.precomputing import PrecomputeRun, Sampling, ServedSettings
from eagle3.target.stored import StoredTarget, stored_target
from eagle3.workers.meter import ProgressBuffer
from eagle3.workers.task import take_from

PROMPT_TOKENS, ANSWER_TOKENS = 128, 256
LAYERS = [2, 16, 29]


@dataclass
class OneTurn:
    """A conversation as an answerer takes it."""

    prompt_ids: list[int]
    seed: int
    waiting: bool = True
    given: list[int] = field(default_factory=list)

    def answer(self, answer: Answer) -> None:
        self.given, self.waiting = answer.token_ids, False

    def fail(self, reason: str) -> None:
        raise RuntimeError(reason)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=2048)
    parser.add_argument("--launch", type=json.loads, default={})
    given = parser.parse_args()
    folder = random_target(given.work / "llama8b")
    target = stored_target(path=str(folder), revision=None, trust_remote_code=False)
    settings = OmegaConf.to_container(OmegaConf.load(ROOT / "conf/launch/default.yaml"))
    own = {"trust_remote_code": False, "max_running_requests": 256, "cuda_graph_max_bs_decode": 256}
    launch = LaunchSettings(**{**settings, **own, **given.launch})  # type: ignore[dict-item]
    results = {"answers": answers(target, launch, given.work, given.requests)}
    print(json.dumps(results), flush=True)
    results["features"] = features(target, launch, given.work, given.requests)
    print(json.dumps(write_result(given.out, results), indent=1))


LLAMA_8B = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "rope_theta": 500000.0,
    "max_position_embeddings": 16384,
}  # fmt: skip
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
}  # fmt: skip


def random_target(folder: Path, *, sizes: dict[str, Any] = LLAMA_8B, device: str = "cuda") -> Path:
    """Make a Llama with random weights, which never end an answer early, unless it is there."""
    if not (folder / "config.json").exists():
        config = LlamaConfig(rms_norm_eps=1e-5, dtype="bfloat16", tie_word_embeddings=False, **sizes)
        torch.manual_seed(0)
        torch.set_default_dtype(torch.bfloat16)
        with torch.device(device):
            model = LlamaForCausalLM(config)
        torch.set_default_dtype(torch.float32)
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(ROOT / "tests/assets/tiny").save_pretrained(folder)
        del model
        torch.cuda.empty_cache()
    return folder


def random_ids(count: int, rng: random.Random) -> list[int]:
    return [rng.randrange(100, 128000) for _ in range(count)]


def timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def offline(url: str, prompts: list[list[int]], sampling: dict[str, Any]) -> float:
    """All requests in one body: what the server can do with them."""

    async def send() -> None:
        async with new_session(timeout_s=3600) as session:
            await ask(session, f"{url}/generate", {"input_ids": prompts, "sampling_params": sampling})

    return timed(lambda: asyncio.run(send()))


def precompute_run() -> PrecomputeRun:
    return compose_run(
        "precompute", "answers=sglang", "features=sglang", "target.path=.", "prompts.path=.", "out_dir=."
    )


def answers(target: StoredTarget, launch: LaunchSettings, work: Path, count: int) -> dict[str, Any]:
    rng = random.Random(0)
    prompts = [random_ids(PROMPT_TOKENS, rng) for _ in range(count)]
    sampling = Sampling(temperature=0.7, top_p=1.0, top_k=0, max_new_tokens=ANSWER_TOKENS)
    run = precompute_run()
    chat = Chat(target.tokenizer, run.chat, stop_ids=target.stop_ids)
    servers = build_servers(launch, 1, target=target, draft=None, folder=work / "logs")
    with serving(servers) as [server], ExitStack() as stack:
        own = replace(run.answers.read(ServedSettings), urls=[server.url])
        answerer = ServedAnswerer(own, target=target, chat=chat, sampling=sampling, launch=launch, folder=work)
        stack.enter_context(answerer)
        at_once = {"temperature": 0.7, "max_new_tokens": ANSWER_TOKENS}
        offline(server.url, prompts[:256], {**at_once, "max_new_tokens": 16})
        rates = {"offline_batch": [], "client": []}  # type: ignore[var-annotated]
        for _ in range(2):
            turns = [OneTurn(prompt, number) for number, prompt in enumerate(prompts)]
            seconds = timed(lambda turns=turns: [*answerer(take_from(turns), ProgressBuffer())])
            rates["client"].append(sum(len(turn.given) for turn in turns) / seconds)
            rates["offline_batch"].append(count * ANSWER_TOKENS / offline(server.url, prompts, at_once))
    return summary(rates, "client", "offline_batch", requests=count)


def features(target: StoredTarget, launch: LaunchSettings, work: Path, count: int) -> dict[str, Any]:
    rng = random.Random(1)
    turns = torch.tensor([0] * PROMPT_TOKENS + [1] * ANSWER_TOKENS)
    conversations = [
        Conversation(f"c{number}", torch.tensor(random_ids(len(turns), rng)), turns) for number in range(count)
    ]
    prompts = [item.input_ids.tolist() for item in conversations]
    engine = precompute_run().features.engine
    assert engine is not None
    extractor = ServedExtractor(
        engine,
        target=target, layers=LAYERS, dtype="bfloat16", teachers="answers", batch_tokens=16384,
        launch=replace(launch, port=launch.port + 10), folder=work / "logs", sentinels=plain_sentinels(target),
    )  # fmt: skip
    rates = {"prefill": [], "captured": []}  # type: ignore[var-annotated]
    tokens = count * len(turns)
    with extractor:
        [server] = extractor.engines.servers
        one = {"temperature": 0, "max_new_tokens": 1}
        offline(server.url, prompts[:64], one)
        [*extractor(iter(conversations[:64]))]
        for _ in range(2):
            rates["captured"].append(tokens / timed(lambda: deque(extractor(iter(conversations)), maxlen=0)))
            rates["prefill"].append(tokens / offline(server.url, prompts, one))
    return summary(rates, "captured", "prefill", conversations=count)


def summary(rates: dict[str, list[float]], ours: str, other: str, **facts: Any) -> dict[str, Any]:
    best = {name: max(each) for name, each in rates.items()}
    return {**facts, "tokens_per_s": best, "all": rates, "ratio": best[ours] / best[other]}


if __name__ == "__main__":
    quiet_libraries()
    main()
