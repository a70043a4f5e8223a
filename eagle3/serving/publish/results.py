"""Measurements of a head: the files that are of it, and one line for each of their numbers."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3.draft_shape import Shape
from eagle3.errors import InputError
from eagle3.serving.bench.report import ratio
from eagle3.serving.bench.stats import Interval
from eagle3.serving.report import NONE, drafts, number, with_error
from eagle3.settings.serving import KEYS_OF_SAMPLING, TokenSampling
from eagle3.storage.records import read_sealed_json

MEASURE = "python serve.py action=compare target.path=TARGET 'heads=[HEAD]' prompts.path=FILE.jsonl"
COLUMNS = ("head", "set", "K", "T", "hardware", "engine", "accept length", "speed-up")
ALL = "all"  # of compare.json's rows: every source, every length of text


def read_results(paths: Sequence[str], weights: Mapping[str, str]) -> list[dict[str, Any]]:
    """Read measurements; `weights` are the sha256 of the head's files of weights, by name.

    Raises InputError for a file that is not of `compare` or `bench`, or not of this head."""
    results = []
    for path in paths:
        found = read_sealed_json(Path(path), made_by=MEASURE)
        if not found.keys() & {"rows", "cells"}:
            raise InputError(f"results: {path} is no compare.json and no results.json of a bench; make one: {MEASURE}")
        if _name_in(found, weights) is None:
            raise InputError(
                f"results: {path} names no head with the weights of this one (by sha256); measure this head: {MEASURE}"
            )
        results.append(found)
    return results


def _name_in(result: Mapping[str, Any], weights: Mapping[str, str]) -> str | None:
    """Return the name under which a result has the head."""
    return next((name for name, facts in result.get("heads", {}).items() if facts["sha256"] == weights), None)


def lines(results: Sequence[Mapping[str, Any]], head: str, weights: Mapping[str, str]) -> Iterator[list[str]]:
    """Yield the values of COLUMNS for each number; `head` is the name that the head is published under."""
    for result in results:
        rows = _decoded(result, _name_in(result, weights)) if "rows" in result else _served(result)
        yield from ([head, *row] for row in rows)


def _decoded(result: Mapping[str, Any], name: str | None) -> Iterator[list[str]]:
    """Yield a line for each row of compare.json that is of the head."""
    where = Path(result["prompts_from"].partition("=")[2]).stem
    engine = f"eagle3 {result['commit']}, PyTorch {result['versions']['torch']}, {result['dtype']}"
    for row in result["rows"]:
        if row["head"] == name:
            part = "" if row["source"] == ALL else f": {row['source']}"
            texts = "" if row["positions"] == ALL else f", texts of {row['positions']} tokens"
            prompts = f"{where}{part}, {row['prompts']} prompts{texts}, at most {result['max_new_tokens']} tokens"
            shape = _windowed(drafts(row), result["draft_window"])
            length = with_error(row["accept_length"]["value"], row["accept_length"]["standard_error"])
            yield [prompts, shape, row["sampling"], result["machine"], engine, length, NONE]


def _served(result: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield a line for each load of a bench that a server with the head took."""
    asked, most = _sampling(result["sampling"]), result["sampling"]["max_new_tokens"]
    for cell in result["cells"]:
        if measured := cell["sides"].get("head"):
            server = result["server_info"]["head"]
            load = f"{measured['requests']} requests, {cell['concurrency']} at a time"
            prompts = f"{cell['prompt_set']}, {load}, at most {most} tokens"
            shape, engine = _served_shape(server), f"SGLang {server['version']}"
            tpot = cell["speed_ups"].get("head", {}).get("tpot")
            found = [number(measured["accept_length"]), ratio(Interval(**tpot) if tpot else None)]
            yield [prompts, shape, asked, result["machine"], engine, *found]


def _sampling(params: Mapping[str, Any]) -> str:
    """Write SGLang's `sampling_params`, where a top_k of -1 is all tokens."""
    top_k = max(0, params.get("top_k", 0))
    sampling = TokenSampling(temperature=params["temperature"], top_p=params.get("top_p", 1.0), top_k=top_k)
    others = params.keys() - {*KEYS_OF_SAMPLING, "stop_token_ids"}
    return ", ".join([str(sampling), *(f"{key} {params[key]}" for key in sorted(others))])


def _served_shape(server: Mapping[str, Any]) -> str:
    keys = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
    return _windowed(str(Shape(*(server[key] for key in keys))), server.get("speculative_draft_window_size"))


def _windowed(shape: str, window: int | None) -> str:
    return shape if window is None else f"{shape}, window of {window}"
