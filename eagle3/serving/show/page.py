"""The page of `action=show`: one file, without network requests or scripts."""

import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from eagle3.decoding.speculate import Measurement, load_speculator
from eagle3.errors import InputError
from eagle3.head_files.files import HeadFiles
from eagle3.secrets import public
from eagle3.serving.check.accept_length import Measurer
from eagle3.serving.check.prompts import PromptSet
from eagle3.serving.report import with_error
from eagle3.serving.show.trace import Trace, rows, shown_answer, shown_rounds, traced, visible
from eagle3.storage.files import write_whole


def require_page(out: str) -> None:
    """Raise InputError, or the system's error, where no page can be written: before an hour of decoding."""
    if "://" in out or Path(out).is_dir():
        raise InputError(f"out={out} must be a file on this machine; give one, e.g. out=show.html")
    Path(out).parent.mkdir(parents=True, exist_ok=True)


def show(measurer: Measurer, files: HeadFiles, out: str, *, origin: dict[str, Any]) -> None:
    """Decode the measurer's prompts and write the page to `out`; `origin`: commit, command, machine, versions."""
    speculator = load_speculator(measurer.target, files)
    prompts = measurer.prompts(None)
    traces = traced(speculator, prompts, measurer.decoding)
    facts = page_facts(measurer, files.path, prompts, traces, origin)
    write_whole(Path(out), page(measurer.target.tokenizer, traces, facts).encode())
    print(f"{out}: accept length {facts['accept length']}")


def page_facts(
    measurer: Measurer, head: Path, prompts: PromptSet, traces: list[Trace], origin: dict[str, Any]
) -> dict[str, str]:
    how = measurer.decoding
    measured = measurer.summary(Measurement([trace.decoded for trace in traces], None, 0.0), prompts)
    drafting = f"{how.shape}: steps={how.steps} topk={how.topk} draft_tokens={how.shape.draft_tokens}"
    drafting += f" draft_window={how.draft_window}" if how.draft_window else ""
    length = with_error(measured.accept_length, measured.standard_error)
    left_out = "".join(f"; {number} left out ({reason})" for reason, number in measured.left_out.items())
    facts = {
        "accept length": f"{length} tokens per verification, {how.shape}",
        "head": str(head),
        "target": str(measurer.target.path),
        "drafts": drafting,
        "answers": f"max_new_tokens={how.max_new_tokens} temperature={how.temperature} seed={how.seed}",
        "dtype": measured.dtype,
        "prompts": f"{prompts}{left_out}",
        "date": f"{datetime.datetime.now().astimezone():%Y-%m-%d %H:%M %Z}",
        "command": origin["command"],
        "made by": f"{origin['commit']} on {origin['machine']}",
    }
    return {name: public(fact) for name, fact in facts.items()}


def page(tokenizer: Any, traces: list[Trace], facts: dict[str, str]) -> str:
    """Render the page: the facts, the table by source and depth, and every answer with its rounds."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["visible"] = visible
    answers = []
    for trace in traces:
        rounds = [*shown_rounds(tokenizer, trace)]
        prompt = visible(tokenizer.decode(trace.prompt_ids))
        answers.append((trace, prompt, shown_answer(tokenizer, trace, rounds), rounds))
    table = rows(traces)
    steps = len(traces[0].decoded.accepted)
    return environment.get_template("page.html.jinja").render(facts=facts, table=table, steps=steps, answers=answers)
