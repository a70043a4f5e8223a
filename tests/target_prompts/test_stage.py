"""precompute.py prompts=from_target with the bundled target: rounds, resume, mixing, servers, and what is refused."""

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from exported_head import FINGERPRINT
from protocol_server import ProtocolServer
from scripts import call_script
from serving_fixtures import serving
from stores import ASSETS

import eagle3.answers.huggingface
import eagle3.answers.served
from eagle3.answers.generate import generate
from eagle3.errors import InputError
from eagle3.storage.files import read_jsonl, write_jsonl
from eagle3.storage.records import read_sealed_json
from eagle3.target.model import Target
from eagle3.target_prompts import build
from eagle3.target_prompts.store import SampleStore

TINY = ASSETS / "tiny"
WRITE = (
    "prompts=from_target", f"target.path={TINY}", "target.device=cpu", "target.check_health=false",
    "prompts.processes=1", "prompts/privacy=off", "prompts.from_target.max_new_tokens=32", "sampling.max_new_tokens=8",
    "sampling.temperature=0", "prompts.duplicates.near=false", "features=huggingface",
)  # fmt: skip
HERE = ("answers=huggingface", "answers.window=32")
Run = Callable[..., Path]


@pytest.fixture(autouse=True)
def small_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "LEAST_SAMPLES", 8)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def command(*overrides: str, name: str = "out", stages: str = "[prompts]", fresh: str | None = None) -> Path:
        out_dir = tmp_path / name
        if fresh is not None:
            shutil.rmtree(out_dir / fresh)
        answers = () if any(each.startswith("answers=") for each in overrides) else HERE
        call_script(
            "precompute", *WRITE, *answers, f"out_dir={out_dir}", f"stages={stages}", *overrides, output_dir=tmp_path
        )
        return out_dir

    return command


@pytest.fixture
def fails(run: Run, error_line: Callable[..., str]) -> Callable[..., str]:
    return lambda *overrides, **settings: error_line(run, *overrides, **settings)


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The seeds of all turns that the target has sampled in this process."""
    seeds: list[int] = []

    def noted(model: Any, prompts: Any, **settings: Any) -> Any:
        seeds.extend(settings["seeds"])
        return generate(model, prompts, **settings)

    monkeypatch.setattr(eagle3.answers.huggingface, "generate", noted)
    return seeds


def read_samples(out_dir: Path) -> list[dict]:
    return [row for path in sorted((out_dir / "target_prompts").glob("round-*.jsonl")) for row in read_jsonl(path)]


def without_settings(out_dir: Path) -> list[dict]:
    return [row | {"answered_with": None} for row in read_samples(out_dir)]


def read_prompt_rows(out_dir: Path) -> list[dict]:
    return [*read_jsonl(out_dir / "prompts" / "prompts.jsonl")]


def file_contents(out_dir: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (out_dir / "target_prompts").iterdir()}


def test_a_target_alone_gives_as_many_prompts_as_are_asked_for_and_answers_them(run, sampled):
    out_dir = run("prompts.limit=12", stages="[prompts,answers]")
    prompts, rows = read_prompt_rows(out_dir), [*read_jsonl(out_dir / "answers" / "answers.jsonl")]
    assert len(prompts) == 12 and {row["prompt_id"] for row in rows} == {prompt["id"] for prompt in prompts}
    assert {(prompt["source"], prompt["license"]) for prompt in prompts} == {("target", "output of the target")}
    source = read_sealed_json(out_dir / "prompts" / "ledger.json", made_by="")["sources"]["target"]
    samples = read_samples(out_dir)
    assert [row["number"] for row in samples] == [*range(source["rows"])]
    assert {row["written_by"] for row in samples} == {str(TINY)}
    refused = Counter(row["refused"] for row in samples if row["refused"])
    assert refused and refused.items() <= source["rejected"].items()  # each is counted by its reason
    usable = [row for row in samples if not row["refused"]]
    made = len(samples) + len(usable)  # user turns and answers
    assert len(sampled) == len(set(sampled)) == made
    again = run("prompts.limit=12", stages="[prompts,answers]")
    assert read_prompt_rows(again) == prompts and len(sampled) == made  # nothing is made twice


@pytest.mark.parametrize("turns", [1, 3])
def test_answers_made_while_the_target_writes_are_those_of_the_answers_stage(run, sampled, caplog, turns):
    caplog.set_level("INFO")
    settings = (
        "prompts.limit=6", f"prompts.from_target.turns={turns}", "prompts.from_target.max_new_tokens=64",
        "prompts.from_target.system_prompts=['Talk of SQL.']", "sampling.max_new_tokens=64", "answers.batch_size=1",
        "sampling.temperature=0.8",
    )  # fmt: skip
    together = run(*settings, name="together", stages="[prompts,answers]")
    made = len(sampled)
    alone = run(*settings, name="alone")
    run(*settings, name="alone", stages="[answers]")
    assert len(set(sampled)) == made <= len(sampled)  # the answers that the samples had, and no others
    assert read_prompt_rows(alone) == read_prompt_rows(together)
    rows = [sorted(read_jsonl(each / "answers/answers.jsonl"), key=lambda row: row["id"]) for each in (together, alone)]
    assert rows[0] == rows[1] and {len(row["turns"]) for row in rows[0]} <= {*range(1, turns + 1)}
    assert max(len(row["turns"]) for row in rows[0]) == turns
    assert "made with other settings" not in caplog.text
    run(*settings, "sampling.seed=1", name="together", stages="[answers]", fresh="answers")
    again = [*read_jsonl(together / "answers/answers.jsonl")]
    assert {row["prompt_id"] for row in again} == {row["prompt_id"] for row in rows[0]}
    samples = sum(bool(row["answers"]) for row in read_samples(together))
    assert f"the answers to {samples} samples in {together}/target_prompts were made with other settings" in caplog.text


def test_some_of_the_targets_prompts_can_be_held_out(run):
    out_dir = run("prompts.limit=12", "prompts.held_out=4")
    held_out = [prompt["id"] for prompt in read_prompt_rows(out_dir / "held_out")]
    training = [prompt["id"] for prompt in read_prompt_rows(out_dir)]
    assert len(held_out) == 4 and len(training) == 8 and not {*held_out} & {*training}


def test_more_prompts_continue_the_samples_and_other_settings_are_refused(run, fails, sampled):
    few = read_prompt_rows(run("prompts.limit=5"))
    made = len(sampled)
    more = read_prompt_rows(run("prompts.limit=10"))
    assert more[:5] == few and len(more) == 10
    assert len(set(sampled)) == len(sampled) > made
    line = fails("prompts.limit=5", "prompts.from_target.temperature=0.9")
    assert "prompts.from_target.temperature=1.0 then, 0.9 now" in line and "target_prompts" in line
    assert read_prompt_rows(run("prompts.limit=5", "prompts.from_target.seed=1", name="other")) != few
    run("prompts.limit=2", "sampling.seed=1")  # decides nothing without answers between turns
    run("prompts.limit=2", "prompts.from_target.turns=2", name="turns")
    line = fails("prompts.limit=2", "prompts.from_target.turns=2", "sampling.seed=1", name="turns")
    assert "sampling.seed=0 then, 1 now" in line


@pytest.mark.parametrize("recorded", [True, False])
def test_other_stop_tokens_are_refused_unless_an_earlier_version_did_not_record_them(tmp_path, recorded):
    def store(**chat: Any) -> SampleStore:
        return SampleStore(tmp_path, FINGERPRINT, {"chat": {"date": "2026-01-01", **chat}})

    store(**{"target_stop_ids": [2]} if recorded else {}).begin(8)
    if recorded:
        with pytest.raises(InputError, match=r"chat\.target_stop_ids=\[2\] then, \[1, 2\] now"):
            store(target_stop_ids=[1, 2])
    else:
        assert store(target_stop_ids=[1, 2]).is_unfinished


@pytest.mark.parametrize(
    ("stages", "stops"),
    [("[prompts]", (4, 6)), ("[prompts,answers]", (7, 9))],  # after so many turns; the first round has twelve samples
)
def test_a_run_that_is_stopped_at_any_sample_resumes_with_each_sample_once(run, monkeypatch, stages, stops):
    settings = ("prompts.limit=9", "answers.window=3", "answers.batch_size=1")
    expected = run(*settings, name="whole", stages=stages)
    unstopped = eagle3.answers.huggingface.generate

    class Killed(BaseException):
        pass

    for after in stops:
        left = [after]

        def dies(model: Any, prompts: Any, left: list[int] = left, **options: Any) -> Any:
            left[0] -= len(prompts)
            if left[0] < 0:
                raise Killed
            return unstopped(model, prompts, **options)

        monkeypatch.setattr(eagle3.answers.huggingface, "generate", dies)
        with pytest.raises(Killed):
            run(*settings, name="killed", stages=stages)
        unfinished = expected.parent / "killed/target_prompts/unfinished.jsonl"
        unfinished.write_bytes(unfinished.read_bytes() + b'{"id": "00')  # a line that was cut short
    monkeypatch.setattr(eagle3.answers.huggingface, "generate", unstopped)
    resumed = run(*settings, name="killed", stages=stages)
    assert file_contents(resumed) == file_contents(expected) and read_prompt_rows(resumed) == read_prompt_rows(expected)


def test_a_limit_that_was_lowered_shortens_the_round_that_was_stopped(run, monkeypatch, sampled):
    noted = eagle3.answers.huggingface.generate

    def stops(*given: Any, **options: Any) -> Any:
        if sampled:
            raise KeyboardInterrupt
        return noted(*given, **options)

    window = ("answers.window=8", "answers.batch_size=8")
    with monkeypatch.context() as first, pytest.raises((KeyboardInterrupt, SystemExit)):
        first.setattr(eagle3.answers.huggingface, "generate", stops)
        run("prompts.limit=200", *window)
    out_dir = run("prompts.limit=12", *window)
    assert len(sampled) == len(set(sampled)) == len(read_samples(out_dir))
    assert len([*read_jsonl(out_dir / "target_prompts" / "round-0000.jsonl")]) == 15  # 12 / FIRST_SHARE, not 250
    assert len(read_prompt_rows(out_dir)) == 12


def own_prompts(folder: Path, count: int) -> Path:
    lines = [*read_jsonl(ASSETS / "prompts" / "train.jsonl")][:count]
    write_jsonl(folder / "own.jsonl", lines)
    return folder / "own.jsonl"


@pytest.mark.parametrize(
    ("settings", "by_target", "own"),
    [
        (["prompts.from_target.limit=4", "prompts.limit=10"], 4, 6),
        (["prompts.from_target.share=0.25", "prompts.limit=null"], 7, 20),
    ],
)
def test_own_prompts_and_the_target_s_are_mixed_by_number_or_share(run, tmp_path, settings, by_target, own):
    path = own_prompts(tmp_path, 20)
    out_dir = run(f"prompts.path={path}", *settings)
    sources = Counter(prompt["source"] == "target" for prompt in read_prompt_rows(out_dir))
    assert sources == {True: by_target, False: own}
    report = (out_dir / "prompts" / "report.md").read_text()
    assert f"| target | {len(read_samples(out_dir))} | {by_target} |" in report and f"| own | 20 | {own} |" in report


def test_own_prompts_of_which_none_passes_are_refused_before_the_target_writes_any(fails, tmp_path, sampled):
    write_jsonl(tmp_path / "own.jsonl", [{"prompt": "Who may use this?"}])
    line = fails(f"prompts.path={tmp_path}/own.jsonl", "prompts.from_target.share=0.5")
    assert "license missing: 1" in line and sampled == []


def test_system_prompts_steer_in_turn_and_are_kept_only_where_asked(run):
    steering = "prompts.from_target.system_prompts=['Talk of SQL.','Talk of Rust.']"
    plain = run("prompts.limit=6", steering)
    kept = run("prompts.limit=6", steering, "prompts.from_target.keep_system_prompts=true", name="kept")
    assert {message["role"] for prompt in read_prompt_rows(plain) for message in prompt["messages"]} == {"user"}
    for row in read_samples(kept):
        assert row["messages"][0] == {"role": "system", "content": ("Talk of SQL.", "Talk of Rust.")[row["number"] % 2]}
    users = [[each for each in row["messages"] if each["role"] == "user"] for row in read_samples(kept)]
    assert users == [row["messages"] for row in read_samples(plain)]


def test_conversations_of_several_turns_have_answers_between_their_user_turns(run):
    turns = ("prompts.from_target.turns=3", "prompts.from_target.max_new_tokens=64", "sampling.max_new_tokens=64")
    out_dir = run("prompts.limit=4", *turns)
    rows = [row for row in read_samples(out_dir) if not row["refused"]]
    assert max(len(row["messages"]) for row in rows) > 2
    for row in rows:
        assert [each["role"] for each in row["messages"]] == (["user", "assistant"] * 3)[: len(row["messages"])]
        assert row["ended"] or len(row["messages"]) == 5
    users = {message["role"] for prompt in read_prompt_rows(out_dir) for message in prompt["messages"]}
    assert users == {"user"}  # the answers come back in the answers stage


def test_a_number_that_duplicates_make_unreachable_ends_with_the_counts_and_what_to_change(run, fails, tmp_path):
    cold = ("prompts.from_target.temperature=0.01", "prompts.from_target.max_new_tokens=64")  # all alike
    line = fails("prompts.limit=50", *cold)
    assert "50 prompts are out of reach" in line and "exact duplicate: " in line
    assert "prompts.from_target.temperature" in line and "prompts.from_target.least_kept=0.05" in line
    assert not (tmp_path / "out/prompts/prompts.jsonl").exists()
    [kept] = {int(word.partition("=")[2].rstrip("),")) for word in line.split() if word.startswith("(prompts.limit=")}
    assert len(read_prompt_rows(run(f"prompts.limit={kept}", *cold))) == kept  # as the message says, with no new sample


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["prompts.limit=null"], "prompts.limit=null: the target can write prompts without end"),
        (["prompts.path=x.jsonl"], "prompts.from_target.share=null"),
        (["prompts.from_target.share=0.5"], "prompts.from_target.share=0.5 is a share of all prompts"),
        (["prompts.path=x.jsonl", "prompts.from_target.share=0.5", "prompts.from_target.limit=5"], "leave one out"),
        (["prompts.from_target.max_new_tokens=4096"], "prompts.from_target.max_new_tokens=4096 leaves no room"),
        (["answers=imported"], "answers=imported"),
    ],
)
def test_settings_without_sense_are_one_line_that_names_the_key(fails, overrides, message):
    assert message in fails(*overrides)


@pytest.mark.parametrize("name", ["no template", "text ends the turn"])
def test_a_target_that_cannot_write_prompts_is_refused_before_its_weights_are_read(fails, without_weights, name):
    template = without_weights / "chat_template.jinja"
    if name == "no template":
        template.unlink()
    else:
        template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:")
    line = fails(f"target.path={without_weights}", "chat.stop_tokens=[]")
    assert "chat.template=FILE" in line and ("no user turn" in line) == (name != "no template")


# --- servers ---------------------------------------------------------------------------------------------------------


def sampling_as(target: Target, numbers: Iterator[int]) -> Callable[..., dict[str, Any]]:
    """What a server decodes: by the seed of the request as the target does here, or by one of its own."""

    def decode(prompt_ids: list[int], sampling: dict[str, Any]) -> dict[str, Any]:
        [answer] = generate(
            target.model, [prompt_ids], seeds=[sampling.get("sampling_seed") or next(numbers)],
            temperature=sampling["temperature"], top_p=1.0, top_k=0, max_new_tokens=sampling["max_new_tokens"],
            stop_ids={*sampling.get("stop_token_ids", []), *target.stop_ids}, pad_id=0,
        )  # fmt: skip
        return {"output_ids": answer.token_ids, "finish": answer.finish_reason, "spec": {}}

    return decode


@pytest.fixture
def server(target: Target) -> ProtocolServer:
    decode = sampling_as(target, iter(range(10**6)))
    return ProtocolServer(decode, {"model_path": target.path}, tokenizer=target.tokenizer)


def at(url: str, name: str = "sglang") -> tuple[str, ...]:
    return f"answers={name}", f"answers.urls=['{url}']", "answers.in_flight=4"


def test_a_server_of_sglang_writes_and_answers_what_the_target_does_here(run, server):
    # One at a time, as this server decodes: in a batch, probabilities differ by rounding, and so may what is drawn.
    here = run("prompts.limit=5", "answers.batch_size=1", name="here", stages="[prompts,answers]")
    with serving(server) as url:
        there = run("prompts.limit=5", *at(url), stages="[prompts,answers]")
    assert without_settings(there) == without_settings(here) and read_prompt_rows(there) == read_prompt_rows(here)
    assert server.most_running <= 4


def test_a_server_of_the_openai_protocol_writes_prompts_and_one_without_token_ids_is_refused(run, fails, server):
    with serving(server) as url:
        out_dir = run("prompts.limit=4", *at(url, "openai"))
        assert len(read_prompt_rows(out_dir)) == 4 and all(isinstance(body["prompt"], list) for body in server.received)
        server.fault = lambda number: web.json_response({"choices": [{"text": "Why?", "finish_reason": "stop"}]})
        line = fails("prompts.limit=6", *at(url, "openai"), name="text")
        assert f"{url} returns text and no token ids" in line
        refusal = {"error": {"message": "prompt must be a string"}}
        server.fault = lambda number: web.json_response(refusal, status=400)
        line = fails("prompts.limit=6", *at(url, "openai"), name="ids")
        assert "does not answer as answers=openai needs" in line and "prompt must be a string" in line


def test_one_start_of_the_engine_is_enough_for_prompts_and_answers(run, server, monkeypatch):
    monkeypatch.setattr(build, "FIRST_SHARE", 1.0)  # so that more rounds are needed
    entered = list[str]()
    enter = eagle3.answers.served.ServedAnswerer.__enter__
    monkeypatch.setattr(
        eagle3.answers.served.ServedAnswerer, "__enter__", lambda self: (entered.append("x"), enter(self))[1]
    )
    with serving(server) as url:
        out_dir = run("prompts.limit=9", *at(url), stages="[prompts,answers]")
    assert entered == ["x"] and len({*(out_dir / "target_prompts").glob("round-*")}) > 1
    assert len([*read_jsonl(out_dir / "answers/answers.jsonl")]) == 9
