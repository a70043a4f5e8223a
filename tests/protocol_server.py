"""An HTTP server that speaks SGLang's protocol and decodes with our own Speculator: what clients are tested against.

It shows nothing about SGLang itself. As a process it takes SGLang's flags; FAULT in its environment plans its end:
"start" (before it listens), a number (with that answer), "stubborn" (SIGTERM is ignored). With a word of WITHOUT_MODEL
it loads nothing, which takes seconds, and its answers are `scripted`.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from aiohttp import web

VERSION = "0.5.17"
WITHOUT_MODEL = {"stubborn", "scripted"}
FAILURE = """\
[2026-01-01 00:00:01] Using default HuggingFace chat template
[2026-01-01 00:00:02 TP0] Scheduler hit an exception: Traceback (most recent call last):
  File "scheduler.py", line 1, in run_scheduler_process
RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.

[2026-01-01 00:00:03] Received sigquit from a child process. It usually means the child failed.
"""


def main() -> None:
    fault = os.environ.get("FAULT", "")
    if fault == "start":
        sys.exit(FAILURE)
    arguments = parsed(sys.argv[1:])
    words = fault.split()
    model, tokenizer = (scripted(arguments), None) if WITHOUT_MODEL & {*words} else loaded(arguments)
    die_at = next((int(word) for word in words if word.isdigit()), None)
    server = ProtocolServer(model, vars(arguments), die_at=die_at, tokenizer=tokenizer)
    if arguments.forward_hooks:
        from standin_engine import StandInEngine

        server.engine = StandInEngine(
            load_served_target(arguments),
            json.loads(arguments.forward_hooks),
            arguments.chunked_prefill_size,
            outputs=arguments.return_aux_hidden_state_layer_ids,
        )
    print("[2026-01-01 00:00:02] The server is fired up and ready to roll!", flush=True)
    if fault == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    web.run_app(
        server.application(), host=arguments.host, port=arguments.port, print=None, handle_signals=fault != "stubborn"
    )


def parsed(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="launch_server.py")
    for name in ("model-path", "host", "dtype", "speculative-algorithm", "speculative-draft-model-path",
                 "speculative-draft-model-quantization", "forward-hooks", "cuda-graph-backend-prefill",
                 "config"):  # fmt: skip
        parser.add_argument(f"--{name}")
    for name in ("port", "tp-size", "max-running-requests", "cuda-graph-max-bs-decode", "base-gpu-id",
                 "speculative-num-steps", "speculative-eagle-topk", "speculative-num-draft-tokens",
                 "chunked-prefill-size"):  # fmt: skip
        parser.add_argument(f"--{name}", type=int)
    for name in ("disable-overlap-schedule", "disable-radix-cache", "enable-return-aux-hidden-states"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--return-aux-hidden-state-layer-ids", type=int, nargs="+")
    arguments = parser.parse_args(words)
    arguments.api_key = json.loads(Path(arguments.config).read_text())["api-key"] if arguments.config else None
    return arguments


Decode = Callable[[list[int], dict[str, Any]], dict[str, Any]]


def scripted(arguments: argparse.Namespace) -> Decode:
    """Four tokens to every prompt; with a head, the last three come from one verification."""
    spec = {"spec_verify_ct": 1, "spec_num_correct_drafts": 2, "spec_correct_drafts_histogram": [0, 0, 1]}
    answer = {"output_ids": [5, 6, 7, 8], "finish": "length"}
    return lambda prompt_ids, sampling: answer | {"spec": spec if arguments.speculative_draft_model_path else {}}


def loaded(arguments: argparse.Namespace) -> tuple[Decode, Any]:
    """The target of the flags, with the head of the flags if there is one, in float32; and its tokenizer."""
    from eagle3.head_files.format import load_head

    target = load_served_target(arguments)
    if arguments.speculative_draft_model_path is None:
        return plain(target), target.tokenizer
    head = load_head(
        arguments.speculative_draft_model_path, dtype=target.embedding.dtype, num_layers=len(target.layers)
    )
    draft = {
        "steps": arguments.speculative_num_steps,
        "topk": arguments.speculative_eagle_topk,
        "draft_tokens": arguments.speculative_num_draft_tokens,
    }
    return speculative(target, head.head, head.capture_layers, **draft), target.tokenizer


def load_served_target(arguments: argparse.Namespace) -> Any:
    from eagle3.target.model import load_target

    return load_target(path=arguments.model_path, dtype="float32", device="cpu", check_health=False)


def plain(target: Any) -> Decode:
    from eagle3.decoding.speculate import plain_greedy

    def decode(prompt_ids: list[int], sampling: dict[str, Any]) -> dict[str, Any]:
        ids = plain_greedy(target, prompt_ids, sampling["max_new_tokens"])
        return {"output_ids": ids, "finish": "stop" if ids[-1] in target.stop_ids else "length", "spec": {}}

    return decode


def speculative(target: Any, head: Any, capture_layers: list[int], **draft: int) -> Decode:
    from eagle3.decoding.speculate import Speculator

    speculator = Speculator(target, head, capture_layers)

    def decode(prompt_ids: list[int], sampling: dict[str, Any]) -> dict[str, Any]:
        temperature = sampling.get("temperature", 0.0)
        made = speculator.decode(
            prompt_ids, max_new_tokens=sampling["max_new_tokens"], temperature=temperature, **draft
        )
        at_least = [made.verifications, *made.accepted, 0]
        spec = {
            "spec_verify_ct": made.verifications,
            "spec_num_correct_drafts": sum(made.accepted),
            "spec_correct_drafts_histogram": [more - fewer for more, fewer in pairwise(at_least)],
        }
        spec = spec if made.verifications else {}  # SGLang leaves them out for an answer of one token
        return {"output_ids": made.token_ids, "finish": made.finish_reason, "spec": spec}

    return decode


class ProtocolServer:
    """The endpoints that this project uses; `received` keeps the bodies of /generate."""

    def __init__(
        self, decode: Decode, arguments: dict[str, Any], *, die_at: int | None = None, tokenizer: Any = None
    ) -> None:
        self.decode, self.tokenizer = decode, tokenizer
        self.key = arguments.pop("api_key", None)
        self.fault: Callable[[int], Any] = lambda number: None  # of a request by its number: a response in its place
        self.stops_in_answers = True
        self.max_model_len = int(1e30)  # as of a tokenizer that names no model_max_length: /tokenize fails
        self.tells_ids = True  # of prompts, by the OpenAI protocol
        self.engine: Callable[[dict[str, Any]], dict[str, Any]] | None = None  # runs prompts in place of `decode`
        self.arguments = arguments
        self.die_at = die_at
        self.received: list[dict[str, Any]] = []
        self.received_at_flush: list[int] = []
        self.information: str | None = None  # sent in place of its facts and its models
        self.last_event: Any = None  # sent as the only event in place of an answer
        self.one_at_a_time = asyncio.Lock()
        self.delay_s = 0.0  # before an answer
        self.running = self.most_running = 0

    def application(self) -> Any:
        @web.middleware
        async def authorized(request: Any, handler: Any) -> Any:
            if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
                return web.json_response({"error": "Unauthorized"}, status=401)
            return await handler(request)

        application = web.Application(client_max_size=2**26, middlewares=[authorized])
        routes = [web.get("/health", self.health), web.get("/server_info", self.server_info)]
        routes += [web.get("/v1/models", self.models), web.post("/flush_cache", self.flush_cache)]
        routes += [web.post("/generate", self.generate), web.post("/v1/completions", self.completions)]
        if self.tokenizer is not None:
            routes += [web.post("/tokenize", self.tokenize), web.post("/v1/chat/completions", self.chat_completions)]
        application.add_routes(routes)
        return application

    async def models(self, request: Any) -> Any:
        models = {"data": [{"id": self.arguments.get("model_path")}]}
        return web.json_response(models) if self.information is None else web.Response(text=self.information)

    async def tokenize(self, request: Any) -> Any:
        body = await request.json()
        if self.max_model_len >= 2**64:  # orjson: "Integer exceeds 64-bit range", which FastAPI answers so
            return web.Response(status=500, text="Internal Server Error")
        ids = self.chat_ids(body) if "messages" in body else self.tokenizer.encode(body["prompt"])
        return web.json_response({"tokens": ids, "count": len(ids), "max_model_len": self.max_model_len})

    def chat_ids(self, body: dict[str, Any]) -> list[int]:
        settings = {"add_generation_prompt": True, **body.get("chat_template_kwargs", {})}
        text = self.tokenizer.apply_chat_template(body["messages"], tokenize=False, **settings)
        return self.tokenizer.encode(text, add_special_tokens=False)

    async def chat_completions(self, request: Any) -> Any:
        """As SGLang answers: the prompt's ids if they are asked for, and one token."""
        body = await request.json()
        ids = self.chat_ids(body) if self.tells_ids and body.get("return_prompt_token_ids") else None
        return web.json_response({"choices": [{"message": {"content": "a"}, "prompt_token_ids": ids}]})

    async def completions(self, request: Any) -> Any:
        """As vLLM answers token ids, and SGLang a text, with the ids of the text if they are asked for."""
        body = await request.json()
        if isinstance(body["prompt"], str):
            ids = self.tokenizer.encode(body["prompt"]) if self.tells_ids and body.get("return_token_ids") else None
            return web.json_response({"choices": [{"text": "a", "prompt_token_ids": ids}]})
        self.received.append(body)
        if (response := self.fault(len(self.received))) is not None:
            return response
        sampling = {"max_new_tokens": body["max_tokens"], "temperature": body["temperature"]}
        await asyncio.sleep(self.delay_s)
        async with self.one_at_a_time:
            made = await asyncio.to_thread(self.decode, body["prompt"], sampling)
        choice = {"text": "", "finish_reason": made["finish"], "stop_reason": None, "token_ids": made["output_ids"]}
        if made["finish"] == "stop" and not self.stops_in_answers:
            choice |= {"stop_reason": made["output_ids"][-1], "token_ids": made["output_ids"][:-1]}
        if not body.get("return_token_ids"):
            del choice["token_ids"]
        return web.json_response({"choices": [choice]})

    async def health(self, request: Any) -> Any:
        return web.Response()

    async def flush_cache(self, request: Any) -> Any:
        self.received_at_flush.append(len(self.received))
        return web.Response(text="Cache flushed.\n")

    async def server_info(self, request: Any) -> Any:
        facts = {**self.arguments, "version": VERSION, "internal_states": [{}]}
        return web.json_response(facts) if self.information is None else web.Response(text=self.information)

    async def generate(self, request: Any) -> Any:
        body = await request.json()
        self.received.append(body)
        if len(self.received) == self.die_at:
            os._exit(9)
        if (response := self.fault(len(self.received))) is not None:
            return response
        if not body["input_ids"]:
            return web.json_response({"error": {"message": "input_ids is empty"}}, status=400)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(self.delay_s)
            async with self.one_at_a_time:  # hooks on one model
                if self.engine is not None:
                    made = await asyncio.to_thread(self.engine, body)
                else:
                    made = await asyncio.to_thread(self.decode, body["input_ids"], body["sampling_params"])
            length = len(made["output_ids"])
            events = [self.event(made, number) for number in range(min(1, length), length + 1)]
            events = events if self.last_event is None else [self.last_event]
            if not body.get("stream"):
                return web.json_response(events[-1])
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            for event in events:
                await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
                await asyncio.sleep(0.0005)  # so that there is a time per token
            await response.write(b"data: [DONE]\n\n")
            return response
        finally:
            self.running -= 1

    def event(self, made: dict[str, Any], tokens: int) -> dict[str, Any]:
        """All of the answer up to now, as SGLang repeats it."""
        whole = tokens == len(made["output_ids"])
        meta = {"completion_tokens": tokens, "finish_reason": {"type": made["finish"]} if whole else None}
        meta |= made["spec"] if whole else {}
        return {"text": "", "output_ids": made["output_ids"][:tokens], "meta_info": meta}


if __name__ == "__main__":
    main()
