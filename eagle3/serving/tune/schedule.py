"""The steps of each load in the spellings of three servers. None of these has run here but SGLang's.

All go by the number of requests that run now. SGLang's keys begin a range, vLLM's entries begin and end one,
TensorRT-LLM's keys end one. Past the last load SGLang and vLLM keep its steps, and TensorRT-LLM drafts nothing.

Sources: speculative/adaptive_spec_params.py of SGLang 0.5.17 and 0.5.23; the page on dynamic speculative decoding of
vLLM 0.25, and v1/spec_decode/dynamic/utils.py; llmapi/llm_args.py of TensorRT-LLM 1.3, since its pull request 10860
(in 1.2 the keys began a range).
"""

import json
import math
import shlex
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import yaml

from eagle3.head_files.servers import SGLANG, VLLM

TENSORRT_LLM = "TensorRT-LLM"
Span = tuple[int, int, int]  # first and last number of requests, and the steps from the one to the other


def schedules(begins: Mapping[int, int], last_load: int, head: str) -> dict[str, dict[str, Any] | None]:
    """Return the steps by server; None where a server cannot be told. `begins`: see `thresholds`."""
    spans = build_spans(begins, last_load)
    most = max(steps for _, _, steps in spans)
    vllm = {
        "method": "eagle3",
        "model": head,
        "num_speculative_tokens": most,
        "num_speculative_tokens_per_batch_size": [[*span] for span in spans],
    }
    tensorrt_llm = {
        "decoding_type": "Eagle3",
        "speculative_model": head,
        "max_draft_len": most,
        "draft_len_schedule": {last: steps for _, last, steps in spans},
    }
    sglang = {str(load): {"candidate_steps": [steps]} for load, steps in begins.items()}
    # TensorRT-LLM requires that the first range has max_draft_len.
    return {SGLANG: sglang, VLLM: vllm, TENSORRT_LLM: tensorrt_llm if spans[0][2] == most else None}


def build_spans(begins: Mapping[int, int], last_load: int) -> list[Span]:
    """Return ranges from one request to `last_load`, without gaps."""
    first, *others = sorted(begins)
    bounds = pairwise([1, *others, last_load + 1])
    return [(begin, end - 1, begins[key]) for key, (begin, end) in zip([first, *others], bounds, strict=True)]


def schedule_lines(schedules: Mapping[str, dict[str, Any] | None]) -> Iterator[str]:
    """Write each as its server takes it."""
    yield f"{SGLANG}, file for --speculative-adaptive-config: {json.dumps(schedules[SGLANG])}"
    yield f"{VLLM}: --speculative-config {shlex.quote(json.dumps(schedules[VLLM]))}"
    if (told := schedules[TENSORRT_LLM]) is None:
        yield f"{TENSORRT_LLM}: cannot be told, its draft_len_schedule must begin with the longest chain"
        return
    config = yaml.safe_dump({"speculative_config": told}, default_flow_style=True, sort_keys=False, width=math.inf)
    yield f"{TENSORRT_LLM}, YAML for --config: {config.strip()}"
