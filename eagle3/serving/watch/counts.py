"""What a running server tells of its drafting: Prometheus text of SGLang or vLLM, or SGLang's /server_info.

Names were read in SGLang 0.5.17 (observability/metrics_collector.py) and vLLM 0.33.0 (v1/spec_decode/metrics.py).
"""

import http.client
import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from eagle3.engine.process import KEY, OPENER, key_header
from eagle3.errors import InputError

Samples = dict[str, list[float]]


class Unavailable(Exception):
    """The server is down, busy or starting, or something else answers in its place: later it may be back."""


class NothingToRead(Exception):
    """The server answers and tells no accept length."""


@dataclass(frozen=True)
class Counts:
    """One look at a server; None is what it does not tell.

    `accept_length` and `throughput` (tokens/s) are SGLang's own of its latest decode batches; `accepted` and `drafts`
    count up since the server's start, as do `tokens`, those that were generated."""

    accept_length: float | None = None
    throughput: float | None = None
    running: float | None = None
    tokens: float | None = None
    accepted: float | None = None
    drafts: float | None = None
    since_start: bool = False  # accept_length is the mean since the server's start


def read_counts(url: str, *, timeout_s: float) -> Counts:
    """Look at a server once: /metrics, or /server_info where that tells nothing."""
    metrics = _get(f"{url}/metrics", timeout_s)
    samples = parsed(metrics) if metrics is not None else {}
    if any(name.startswith("vllm:") for name in samples):
        return of_vllm(samples)
    counts = of_sglang(samples)
    return counts if counts.accept_length is not None else _of_server_info(url, counts, timeout_s)


def parsed(text: str) -> Samples:
    """Return the values of each sample, whatever its labels: one for each rank or engine."""
    samples: Samples = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append(sample.value)
    except ValueError:
        raise Unavailable("what came from /metrics is no Prometheus text") from None
    return samples


def of_sglang(samples: Samples) -> Counts:
    lengths = [value for value in samples.get("sglang:spec_accept_length", []) if value > 0]  # 0: has not drafted yet
    return Counts(
        accept_length=sum(lengths) / len(lengths) if lengths else None,
        throughput=_sum(samples, "sglang:gen_throughput"),
        running=_sum(samples, "sglang:num_running_reqs"),
        tokens=_sum(samples, "sglang:generation_tokens_total"),
    )


def of_vllm(samples: Samples) -> Counts:
    drafts = _sum(samples, "vllm:spec_decode_num_drafts_total")
    if drafts is None:
        raise NothingToRead("vLLM runs without a head; serve it with --speculative-config")
    return Counts(
        running=_sum(samples, "vllm:num_requests_running"),
        tokens=_sum(samples, "vllm:generation_tokens_total"),
        accepted=_sum(samples, "vllm:spec_decode_num_accepted_tokens_total"),
        drafts=drafts,
    )


def _sum(samples: Samples, name: str) -> float | None:
    return sum(samples[name]) if name in samples else None


def _of_server_info(url: str, counts: Counts, timeout_s: float) -> Counts:
    """Take the mean since the start; None before the first draft."""
    text = _get(f"{url}/server_info", timeout_s)
    if text is None:
        raise NothingToRead("neither /metrics nor /server_info is there; give the address of SGLang or vLLM")
    try:
        info = json.loads(text)
        algorithm, states = info.get("speculative_algorithm"), info.get("internal_states") or []
        lengths = [state["avg_spec_accept_length"] for state in states if "avg_spec_accept_length" in state]
        mean = float(sum(lengths) / len(lengths)) if lengths else None
    except (ValueError, TypeError, AttributeError):
        raise Unavailable("what came from /server_info is not SGLang's") from None
    if not algorithm:
        raise NothingToRead("SGLang runs without a head; serve it with one: serve.py action=launch head=HEAD")
    return Counts(mean, counts.throughput, counts.running, counts.tokens, since_start=True)


def _get(url: str, timeout_s: float) -> str | None:
    """Return what lies at `url`, None where nothing does."""
    try:
        with OPENER.open(urllib.request.Request(url, headers=key_header()), timeout=timeout_s) as response:
            content: Any = response.read()
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 404:
            return None
        if error.code in (401, 403):
            raise InputError(
                f"watch.url: {url} asks for a key (HTTP {error.code}); set {KEY} in the environment"
            ) from None
        raise Unavailable(f"HTTP {error.code} from {url}") from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise Unavailable(f"no answer from {url}: {str(reason) or type(error).__name__}"[:200]) from None
    return str(content, "utf-8", "replace")
