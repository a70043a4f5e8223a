"""The answers stage as a config builds it."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from answering import QUICK, prompt
from exported_head import edit_json
from protocol_server import ProtocolServer
from scripts import call_script
from serving_fixtures import serving
from transformers import AutoTokenizer

from eagle3.answers.build import answering
from eagle3.compose import compose_run
from eagle3.features.concat import open_source
from eagle3.workers.meter import ProgressBuffer
from eagle3.workers.task import WorkerId, take_from

END_OF_TEXT, END_OF_TURN = 0, 2


@pytest.fixture
def other_end(tiny_path: Path, tmp_path: Path) -> Path:
    """The bundled target as a base model that was tuned on ChatML: <|endoftext|> is its only stop token still."""
    folder = Path(shutil.copytree(tiny_path, tmp_path / "target"))
    edit_json(folder / "config.json", eos_token_id=END_OF_TEXT)
    special = ["<|im_start|>", "<|im_end|>"]
    edit_json(folder / "tokenizer_config.json", eos_token="<|endoftext|>", extra_special_tokens=special)
    return folder


def answered(prompts: list[dict[str, Any]], folder: Path, *overrides: str) -> list[Any]:
    run = compose_run("precompute", "prompts.path=x", f"out_dir={folder}", "target.device=cpu", *overrides)
    with answering(run, folder, WorkerId()) as task:
        finished = task(take_from((each["id"], each) for each in prompts), ProgressBuffer())
        return [row for results in finished for _, (rows, _) in results for row in rows]


@pytest.mark.parametrize("name", ["huggingface", "sglang", "openai"])
def test_the_templates_end_of_turn_ends_answers_of_every_engine(other_end: Path, tmp_path: Path, name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(other_end)
    decode = {"output_ids": [70, END_OF_TURN], "finish": "stop", "spec": {}}
    server = ProtocolServer(lambda *_: decode, {"model_path": str(other_end)}, tokenizer=tokenizer)
    overrides = [f"target.path={other_end}", f"answers={name}", "sampling.temperature=0", "sampling.max_new_tokens=20"]
    with nullcontext() if name == "huggingface" else serving(server) as url:
        urls = [f"answers.urls=[{url}]"] if url else []
        [row] = answered([prompt(0, *QUICK[:2])], tmp_path, *overrides, *urls)
    assert row.finish_reasons == ["stop", "stop"]
    for begin, end in row.turns:
        assert row.input_ids[begin:end].count(END_OF_TURN) == 1 and row.input_ids[end - 1] == END_OF_TURN
    for body in server.received:
        assert body.get("sampling_params", body)["stop_token_ids"] == [END_OF_TEXT, END_OF_TURN]


MODES = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if thinking %}<think>\n{% endif %}{% endif %}"
)


@pytest.mark.parametrize("name", ["huggingface", "sglang"])
def test_each_prompt_is_rendered_with_its_own_variables(tiny_path: Path, tmp_path: Path, name: str) -> None:
    template = tmp_path / "modes.jinja"
    template.write_text(MODES)
    tokenizer = AutoTokenizer.from_pretrained(tiny_path)
    tokenizer.chat_template = MODES
    decode = {"output_ids": [70, END_OF_TURN], "finish": "stop", "spec": {}}
    server = ProtocolServer(lambda *_: decode, {"model_path": str(tiny_path)}, tokenizer=tokenizer)
    overrides = [
        f"target.path={tiny_path}",
        f"answers={name}",
        f"chat.template={template}",
        "sampling.max_new_tokens=2",
    ]
    prompts = [prompt(number, "Hi") | {"chat_template_kwargs": {"thinking": number == 1}} for number in range(3)]
    with nullcontext() if name == "huggingface" else serving(server) as url:
        urls = [f"answers.urls=[{url}]"] if url else []
        rows = answered(prompts, tmp_path, *overrides, *urls)
    asked = {row.prompt_id: tokenizer.decode(row.input_ids[: row.turns[0][0]]) for row in rows}
    assert {name: text.endswith("<think>\n") for name, text in asked.items()} == {"p0": False, "p1": True, "p2": False}


def test_a_turn_that_is_not_to_be_trained_is_context_in_the_stored_sample(tiny_path: Path, tmp_path: Path) -> None:
    marks = [{"weight": 0}, {"train": False}, {"loss": False}]
    rows = [
        {
            "id": f"r{number}",
            "messages": [
                {"role": "user", "content": f"How does rain form, in {number + 2} words?"},
                {"role": "assistant", "content": "Wrong answer."} | mark,
                {"role": "user", "content": "That is wrong."},
                {"role": "assistant", "content": "Water falls."},
            ],
        }
        for number, mark in enumerate(marks)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    own = ("prompts=in_house",)
    target = (f"target.path={tiny_path}", "target.dtype=float32", "target.device=cpu", "target.check_health=false")
    data = (f"prompts.path={tmp_path}/rows.jsonl", "prompts.processes=1", f"out_dir={tmp_path}", "answers=imported")
    call_script("precompute", *own, *target, *data, "features=huggingface", output_dir=tmp_path / "logs")
    tokenizer, store = AutoTokenizer.from_pretrained(tiny_path), open_source(str(tmp_path / "features"))
    samples = [store.read(ref) for ref in store.samples]
    assert len(samples) == len(marks)
    for sample in samples:
        assert "Wrong answer." in tokenizer.decode(sample.input_ids)
        assert tokenizer.decode(sample.input_ids[sample.turns > 0]) == "Water falls.<|im_end|>"
