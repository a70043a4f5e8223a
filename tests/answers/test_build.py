"""The answers stage as a config builds it."""

import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from answering import QUICK, prompt
from exported_head import edit_json
from protocol_server import ProtocolServer
from serving_fixtures import serving
from transformers import AutoTokenizer

from eagle3.answers.build import answering
from eagle3.compose import compose_run
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
def test_the_templates_end_of_turn_ends_answers_of_every_engine(other_end, tmp_path, name):
    tokenizer = AutoTokenizer.from_pretrained(other_end)

    def decode(prompt_ids, sampling):
        ended = sampling["max_new_tokens"] > 1
        return {"output_ids": [70, END_OF_TURN][: 1 + ended], "finish": "stop" if ended else "length", "spec": {}}

    server = ProtocolServer(decode, {"model_path": str(other_end)}, tokenizer=tokenizer)
    overrides = [f"target.path={other_end}", f"answers={name}", "sampling.temperature=0", "sampling.max_new_tokens=20"]
    with nullcontext() if name == "huggingface" else serving(server) as url:
        urls = [f"answers.urls=[{url}]"] if url else []
        [row] = answered([prompt(0, *QUICK[:2])], tmp_path, *overrides, *urls)
    assert row.finish_reasons == ["stop", "stop"]
    for begin, end in row.turns:
        assert row.input_ids[begin:end].count(END_OF_TURN) == 1 and row.input_ids[end - 1] == END_OF_TURN
    for body in server.received:
        assert body.get("sampling_params", body)["stop_token_ids"] == [END_OF_TEXT, END_OF_TURN]
