"""The stage that answers, with whatever answers."""

from contextlib import contextmanager
from dataclasses import asdict, fields

from eagle3.answers.answerer import Answering
from eagle3.answers.build import answer_prompts, import_answers, prompt_limit
from eagle3.answers.huggingface import HuggingFaceAnswerer
from eagle3.answers.imported import ImportedAnswers
from eagle3.answers.store import MadeWith
from eagle3.settings.precomputing import Sampling
from eagle3.storage.files import read_jsonl, write_jsonl
from eagle3.workers.in_process import InProcess

# The bundled target answers these in 6 to 12 tokens.
QUICK = [
    "How is `sympy.polys.monomials.MonomialOps` used?",
    "Explain `vfield` from `sympy.polys.fields`.",
    "Explain `to_dict` from `sympy.polys.polyclasses`.",
]

SETTINGS = {
    "max_new_tokens": 8,
    "max_prompt_tokens": None,
    "temperature": 0.7,
    "top_p": 1.0,
    "top_k": 0,
    "seed": 0,
    "on_length": "keep",
}
BATCHES = {"batch_size": 4, "batch_tokens": 4096, "window": 3}


def prompt(number, *questions):
    messages = [{"role": "user", "content": question} for question in questions]
    return {"id": f"p{number}", "source": "test", "license": "MIT", "messages": messages}


def write_prompts(out_dir, prompts):
    write_jsonl(out_dir / "prompts" / "prompts.jsonl", prompts)
    return out_dir


def read_answer_errors(out_dir):
    return list(read_jsonl(out_dir / "answers" / "errors.jsonl"))


def answer_by(answerer, target, chat, sampling, out_dir, *, seed=0, max_prompt_tokens=None, on_length="keep"):
    """Let this process answer the prompts in `out_dir`."""
    made_with = MadeWith(
        answers=answerer.name, chat=chat.settings, sampling=asdict(sampling), seed=seed, on_length=on_length
    )
    limit = prompt_limit(target.text_config, sampling.max_new_tokens, max_prompt_tokens)
    parts = {"seed": seed, "max_prompt_tokens": limit, "on_length": on_length}

    @contextmanager
    def build(place):
        with answerer:
            yield Answering(answerer, chat, **parts)

    return answer_prompts(
        target=target,
        made_with=made_with,
        workers=InProcess(),
        build=build,
        ahead=1,
        max_prompt_tokens=max_prompt_tokens,
        out_dir=out_dir,
    )


def read_answer_rows(out_dir):
    return {row["id"]: row for row in read_jsonl(out_dir / "answers" / "answers.jsonl")}


def run(target, chat, out_dir, **changes):
    settings = SETTINGS | BATCHES | changes
    sampling = Sampling(**{field.name: settings.pop(field.name) for field in fields(Sampling)})
    batches = {key: settings.pop(key) for key in BATCHES}
    if imported := settings.pop("imported", None):
        answers, limit = ImportedAnswers(finish_reason=imported), settings["max_prompt_tokens"]
        return import_answers(target=target, chat=chat, answers=answers, max_prompt_tokens=limit, out_dir=out_dir)
    answerer = HuggingFaceAnswerer(target=target, sampling=sampling, **batches)
    return answer_by(answerer, target, chat, sampling, out_dir, **settings)
