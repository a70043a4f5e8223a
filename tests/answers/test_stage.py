"""The answers stage with the bundled target: whole or absent, resumable, the same rows in any order and company."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from answering import BATCHES, QUICK, answer_by, prompt, read_answer_errors, read_answer_rows, run, write_prompts
from chats import SETTINGS
from exported_head import tiny_chat
from prompt_stage import read_messages
from stores import ASSETS
from transformers import AutoTokenizer

import eagle3.answers.huggingface
from eagle3.answers.chat import Chat
from eagle3.answers.dialogue import NO_CONTENT, Dialogue
from eagle3.answers.huggingface import HuggingFaceAnswerer
from eagle3.answers.imported import END_OF_TURN_INSIDE, NOT_THE_TEXT, TWO_ANSWERS
from eagle3.answers.store import RECORDED_LATER, AnswerStore, read_answers
from eagle3.engine.endpoint import Answer
from eagle3.errors import InputError
from eagle3.settings.precomputing import ChatSettings, Sampling
from eagle3.storage.files import read_jsonl, sha256_file
from eagle3.storage.records import sealed_bytes, write_sealed_json
from eagle3.workers.task import take_from


@pytest.fixture
def out_dir(tmp_path):
    singles = [prompt(number, QUICK[number % 3] + "!" * number) for number in range(6)]
    return write_prompts(tmp_path / "out", [*singles, prompt(6, *QUICK)])


SHORTENING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content[:3] if m.role == 'assistant' and not loop.last else m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def shortening_chat(folder):
    """An earlier answer is shortened, as templates do that strip reasoning: the next prompt never continues the row."""
    (folder / "shortening.jinja").write_text(SHORTENING)
    return tiny_chat(template=str(folder / "shortening.jinja"))


@pytest.fixture
def asked(monkeypatch):
    """The prompts that were handed to the target so far."""
    generate, asked = eagle3.answers.huggingface.generate, []

    def generate_and_note(model, prompts, **settings):
        asked.extend(map(tuple, prompts))
        return generate(model, prompts, **settings)

    monkeypatch.setattr(eagle3.answers.huggingface, "generate", generate_and_note)
    return asked


def asked_for(rows):
    return [tuple(row["input_ids"][:start]) for row in rows.values() for start, _ in row["turns"]]


def copy_prompts(out_dir, to):
    return write_prompts(to, list(read_jsonl(out_dir / "prompts" / "prompts.jsonl")))


def test_rows_hold_the_prompt_as_served_and_the_answer_with_its_end_and_are_left_alone(target, chat, out_dir):
    manifest = run(target, chat, out_dir, max_new_tokens=10, temperature=0.0)
    rows = read_answer_rows(out_dir)
    asked = {row["id"]: row for row in read_jsonl(out_dir / "prompts" / "prompts.jsonl")}
    assert {row["prompt_id"] for row in rows.values()} == set(asked)
    for row in rows.values():
        (start, end), reason = row["turns"][0], row["finish_reasons"][0]
        if row["id"].endswith("#0"):
            assert row["input_ids"][:start] == chat.prompt_ids(asked[row["prompt_id"]]["messages"][:1])
        assert (row["input_ids"][end - 1] in target.stop_ids) == (reason == "stop")
        assert row["messages"][-1]["role"] == "assistant" and row["license"] == "MIT"
    spans = [(start, end) for row in rows.values() for start, end in row["turns"]]
    assert manifest.answer_tokens == sum(end - start for start, end in spans)
    assert manifest.turns == len(spans) == sum(manifest.finish_reasons.values())
    assert (manifest.prompts, manifest.rows) == (len(asked), len(rows))
    stored = read_answers(out_dir / "answers")
    assert stored.complete and stored.target.weights_hash and manifest.errors == {}
    assert set(manifest.finish_reasons) == {"stop", "length"}
    assert run(target, chat, out_dir, max_new_tokens=10, temperature=0.0) == manifest
    assert read_answer_rows(out_dir) == rows


def test_order_window_and_batch_size_do_not_change_a_row_and_the_seed_does(target, chat, out_dir, tmp_path):
    run(target, chat, out_dir)
    prompts = list(read_jsonl(out_dir / "prompts" / "prompts.jsonl"))
    other = write_prompts(tmp_path / "other", prompts[::-1])
    run(target, chat, other, batch_size=2, window=5)
    assert read_answer_rows(out_dir) == read_answer_rows(other)
    seeded = copy_prompts(out_dir, tmp_path / "seeded")
    run(target, chat, seeded, seed=1)
    ids, others = ([row["input_ids"] for row in read_answer_rows(folder).values()] for folder in (out_dir, seeded))
    assert ids != others


def test_a_conversation_stays_one_row_while_each_prompt_continues_it(target, chat, tmp_path):
    out_dir = write_prompts(tmp_path, [prompt(0, *QUICK)])
    run(target, chat, out_dir, max_new_tokens=40, temperature=0.0)
    (row,) = read_answer_rows(out_dir).values()
    assert row["id"] == "p0#0" and row["finish_reasons"] == ["stop"] * 3 and len(set(row["seeds"])) == 3
    for (start, end), index in zip(row["turns"], (1, 3, 5), strict=True):
        assert row["input_ids"][:start] == chat.prompt_ids(row["messages"][:index])
        assert (
            chat.answer_text(row["input_ids"][:start], row["input_ids"][start:end]) == row["messages"][index]["content"]
        )


def test_a_prompt_that_rewrites_earlier_answers_begins_a_new_row(target, tmp_path):
    chat = shortening_chat(tmp_path)
    out_dir = write_prompts(tmp_path, [prompt(0, *QUICK[:2])])
    run(target, chat, out_dir, max_new_tokens=40, temperature=0.0)
    rows = read_answer_rows(out_dir)
    assert list(rows) == ["p0#0", "p0#1"]
    for row, index in zip(rows.values(), (1, 3), strict=True):
        assert len(row["turns"]) == 1
        assert row["input_ids"][: row["turns"][0][0]] == chat.prompt_ids(row["messages"][:index])


def test_an_answer_without_a_content_is_kept_and_ends_its_conversation_only_if_a_turn_would_follow(chat):
    answer = Answer(chat.tokenizer("Hi<|im_start|>there<|im_end|>")["input_ids"], "stop")
    for questions, reasons in ((QUICK[:2], [NO_CONTENT]), (QUICK[:1], [])):
        dialogue = Dialogue(prompt(0, *questions), chat, seed=0, max_prompt_tokens=None, on_length="keep")
        dialogue.answer(answer)
        (row,) = dialogue.rows
        assert row.input_ids[slice(*row.turns[0])] == answer.token_ids and row.messages[-1]["content"] is None
        assert [error.reason for error in dialogue.errors] == reasons and not dialogue.waiting


def test_a_cut_answer_ends_its_conversation_and_is_kept_or_dropped(target, chat, tmp_path):
    for on_length in ("keep", "drop"):
        out_dir = write_prompts(tmp_path / on_length, [prompt(0, QUICK[0]), prompt(1, "List files", "More")])
        counts = run(target, chat, out_dir, on_length=on_length, temperature=0.0, max_new_tokens=8)
        rows = read_answer_rows(out_dir)
        assert rows["p0#0"]["finish_reasons"] == ["stop"]
        assert counts.cut == 1
        if on_length == "keep":
            assert rows["p1#0"]["finish_reasons"] == ["length"] and len(rows) == 2
        else:
            assert "p1#0" not in rows and sum(counts.errors.values()) == 1
            (error,) = read_answer_errors(out_dir)
            assert error["prompt_id"] == "p1" and "on_length=drop" in error["reason"]


def test_a_file_torn_at_any_byte_is_mended(target, tmp_path):
    chat = shortening_chat(tmp_path)
    prompts = [prompt(0, QUICK[0]), prompt(1, *QUICK[:2]), prompt(2, *QUICK[1:])]
    out_dir = write_prompts(tmp_path, prompts)
    settings = {"temperature": 0.0, "max_new_tokens": 40}
    run(target, chat, out_dir, **settings)
    path = out_dir / "answers/answers.jsonl"
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    assert len(lines) == 5
    for size in (0, 10, len(lines[0]) + 1, sum(map(len, lines[:2])), sum(map(len, lines[:4])), len(whole) - 1):
        unfinish(out_dir)
        path.write_bytes(whole[:size])
        run(target, chat, out_dir, **settings)
        assert path.read_bytes() == whole


def unfinish(out_dir: Path) -> None:
    """Leave the manifest as a kill does."""
    manifest = read_answers(out_dir / "answers")
    unfinished = replace(manifest, complete=False, counts=None, files=None)
    (out_dir / "answers/manifest.json").write_bytes(sealed_bytes(unfinished))


@pytest.mark.parametrize("name", ["answers.jsonl", "errors.jsonl"])
def test_a_finished_file_that_was_cut_or_changed_is_neither_mended_nor_used(target, chat, out_dir, name):
    run(target, chat, out_dir)
    path = out_dir / "answers" / name
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole.replace(b"1", b"2"), whole + b"\n"):
        path.write_bytes(damaged)
        if damaged != whole:
            with pytest.raises(InputError, match=rf"{name} holds .* bytes with sha256 .*: it is damaged or was edited"):
                run(target, chat, out_dir)
            assert path.read_bytes() == damaged
    path.unlink()
    with pytest.raises(InputError, match=rf"{name} is missing"):
        run(target, chat, out_dir)


def test_a_changed_byte_or_a_row_twice_in_an_unfinished_file_is_found_before_more_are_made(
    target, chat, out_dir, asked
):
    run(target, chat, out_dir)
    path = out_dir / "answers/answers.jsonl"
    whole = path.read_bytes()
    unfinish(out_dir)
    asked.clear()
    for place in range(0, whole.index(b"\n"), 97):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(InputError, match=r"answers\.jsonl line 1: damaged or edited, .* and run again"):
            run(target, chat, out_dir)
    half = whole[: whole.index(b"\n") + 1]
    for twice in (2 * whole, 2 * half):  # as two writers would leave it, who took no lock
        path.write_bytes(twice)
        with pytest.raises(InputError, match=r"answers\.jsonl: duplicate row .*; delete "):
            run(target, chat, out_dir)
    assert asked == []


def test_prompts_that_are_no_longer_those_of_their_ledger_are_not_answered(target, chat, out_dir):
    prompts = out_dir / "prompts/prompts.jsonl"
    write_sealed_json(out_dir / "prompts/ledger.json", {"sha256": sha256_file(prompts)})
    run(target, chat, out_dir)
    prompts.write_bytes(prompts.read_bytes()[:-200])
    with pytest.raises(InputError, match=r"prompts\.jsonl does not have the sha256 that .*ledger\.json says"):
        run(target, chat, out_dir)


@pytest.mark.parametrize("name", ["errors.jsonl", "answers.jsonl"])
def test_a_kill_between_errors_and_rows_loses_neither_and_asks_for_nothing_twice(
    target, chat, tmp_path, monkeypatch, asked, name
):
    long = "too long " * 30
    prompts = [prompt(0, QUICK[0]), prompt(1, QUICK[0], long), prompt(2, long), prompt(3, QUICK[1])]
    settings = {"max_prompt_tokens": 40, "temperature": 0.0, "max_new_tokens": 20, "window": 1}
    whole = run(target, chat, write_prompts(tmp_path / "whole", prompts), **settings)
    assert sum(whole.errors.values()) == 2
    append, out_dir, appended = AnswerStore._append, write_prompts(tmp_path / "out", prompts), []

    def killed(store, path, rows):
        appended.append(path.name)
        if appended.count(name) == 2:
            raise KeyboardInterrupt
        append(store, path, rows)

    monkeypatch.setattr(AnswerStore, "_append", killed)
    with pytest.raises(KeyboardInterrupt):
        run(target, chat, out_dir, **settings)
    monkeypatch.setattr(AnswerStore, "_append", append)
    kept = read_answer_rows(out_dir)
    assert set(kept) == {"p0#0"}
    asked.clear()
    assert run(target, chat, out_dir, **settings) == whole
    assert Counter(asked) + Counter(asked_for(kept)) == Counter(asked_for(read_answer_rows(tmp_path / "whole")))
    assert read_answer_rows(out_dir) == read_answer_rows(tmp_path / "whole")
    assert read_answer_errors(out_dir) == read_answer_errors(tmp_path / "whole")


def test_a_kill_in_the_first_window_keeps_the_batches_that_are_finished_and_says_how_many(
    target, chat, out_dir, tmp_path, monkeypatch, caplog
):
    caplog.set_level("INFO")
    run(target, chat, copy_prompts(out_dir, tmp_path / "whole"))
    generate, batches = eagle3.answers.huggingface.generate, []

    def killed(model, prompts, **settings):
        batches.append(prompts)
        if len(batches) == 3:
            raise KeyboardInterrupt
        return generate(model, prompts, **settings)

    monkeypatch.setattr(eagle3.answers.huggingface, "generate", killed)
    with pytest.raises(KeyboardInterrupt):
        run(target, chat, out_dir, batch_size=2, window=1024)
    kept = {row["prompt_id"] for row in read_answer_rows(out_dir).values()}
    assert len(kept) >= 3
    assert f"kept {len(kept)} of 7 prompts" in caplog.text
    caplog.clear()
    monkeypatch.setattr(eagle3.answers.huggingface, "generate", generate)
    run(target, chat, out_dir, batch_size=2, window=1024)
    assert f"kept {len(kept)} of 7 prompts" in caplog.text
    assert read_answer_rows(out_dir) == read_answer_rows(tmp_path / "whole")


def test_tokens_are_counted_while_they_are_made(target, chat, monkeypatch):
    counted = []

    class Counting:
        def add(self, *, ended=0, tokens=0):
            counted.append((ended, tokens))

    sampling = Sampling(max_new_tokens=8, temperature=0.0, top_p=1.0, top_k=0)
    answerer = HuggingFaceAnswerer(target=target, sampling=sampling, batch_size=4, batch_tokens=4096, window=1024)
    dialogues = [Dialogue(prompt(n, text), chat, seed=0, max_prompt_tokens=None, on_length="keep")
                 for n, text in enumerate(QUICK)]  # fmt: skip
    [*answerer(take_from(dialogues), Counting())]
    answers = [end - start for each in dialogues for row in each.rows for start, end in row.turns]
    assert sum(tokens for _, tokens in counted) == sum(answers)
    assert [ended for ended, _ in counted] == [0] * max(answers) + [3]  # after each step, not at the end


def test_prompts_of_a_batch_that_fails_are_answered_alone_and_only_the_faulty_one_is_an_error(
    target, chat, out_dir, tmp_path, monkeypatch
):
    whole = copy_prompts(out_dir, tmp_path / "whole")
    run(target, chat, whole)
    generate, poison = eagle3.answers.huggingface.generate, "!!!!!"

    def failing(model, prompts, **settings):
        texts = target.tokenizer.batch_decode(prompts)
        if len(prompts) > 1 or any(poison in text for text in texts):
            raise torch.OutOfMemoryError("no room for 5 GB")
        return generate(model, prompts, **settings)

    monkeypatch.setattr(eagle3.answers.huggingface, "generate", failing)
    manifest = run(target, chat, out_dir)
    assert [error["prompt_id"] for error in read_answer_errors(out_dir)] == ["p5"]
    assert manifest.errors == {"OutOfMemoryError": 1}
    others = {key: row for key, row in read_answer_rows(whole).items() if row["prompt_id"] != "p5"}
    assert read_answer_rows(out_dir) == others
    monkeypatch.undo()
    assert run(target, chat, out_dir).errors == {}
    assert read_answer_rows(out_dir) == read_answer_rows(whole)


def test_a_prompt_that_is_too_long_is_an_error_until_the_limit_allows_it(target, chat, tmp_path):
    secret = "confidential " * 30
    out_dir = write_prompts(tmp_path, [prompt(0, QUICK[0]), prompt(1, secret), prompt(2, QUICK[0], secret)])
    run(target, chat, out_dir, max_prompt_tokens=40, max_new_tokens=8, temperature=0.0)
    assert set(read_answer_rows(out_dir)) == {"p0#0", "p2#0"}
    first, second = read_answer_errors(out_dir)
    assert (first["prompt_id"], first["turn"], first["retry"]) == ("p1", 0, False)
    assert (second["prompt_id"], second["turn"], second["retry"]) == ("p2", 1, True)
    for part in ("sampling.max_prompt_tokens", "sampling.max_new_tokens in the target's context", "at most 40"):
        assert part in first["reason"]
    assert "confidential" not in json.dumps([first, second])
    run(target, chat, out_dir, max_prompt_tokens=None, max_new_tokens=8, temperature=0.0)
    assert "p1#0" in read_answer_rows(out_dir)
    assert [error["prompt_id"] for error in read_answer_errors(out_dir)] == ["p2"]


def test_imported_conversations_give_a_row_for_each_answer_and_reasons_by_name(target, chat, tmp_path):
    talk, twice, foreign = (prompt(number, "Say hi") for number in (0, 2, 3))
    again = {"role": "user", "content": "Again"}
    hi, control, hello = ({"role": "assistant", "content": text} for text in ("Hi!", "Hi<|im_end|>", "Hello."))
    talk["messages"] += [hi, again, control, again, hello]
    twice["messages"] += [hi, hi]
    foreign["messages"] += [{**hi, "prompt_ids": [5, 6], "output_ids": [7, 2], "finish_reason": "stop"}]
    out_dir = write_prompts(tmp_path, [talk, prompt(1, "no answer"), twice, foreign])
    counts = run(target, chat, out_dir, imported="stop")
    rows = read_answer_rows(out_dir)
    assert list(rows) == ["p0#0", "p0#2"] and counts.finish_reasons == {"unstated": 2}
    for row, text in zip(rows.values(), ("Hi!", "Hello."), strict=True):
        ((start, end),) = row["turns"]
        assert target.tokenizer.decode(row["input_ids"][start:end]) == text + "<|im_end|>"
        assert end == len(row["input_ids"]) and row["messages"][-1]["content"] == text
    refused = [(error["prompt_id"], error["turn"], error["reason"]) for error in read_answer_errors(out_dir)]
    none = "the conversation has no assistant turn to import"
    assert refused == [
        ("p0", 1, END_OF_TURN_INSIDE), ("p1", 0, none),
        ("p2", 0, TWO_ANSWERS), ("p2", 1, TWO_ANSWERS), ("p3", 0, NOT_THE_TEXT),
    ]  # fmt: skip
    assert counts.errors == {END_OF_TURN_INSIDE: 1, none: 1, TWO_ANSWERS: 2, NOT_THE_TEXT: 1}


def made_elsewhere(rows, made):
    """The answers of `rows` as raw conversations, each up to the answer that `made` is said of."""
    for row in rows.values():
        answers = [index for index, message in enumerate(row["messages"]) if message["role"] == "assistant"]
        for (start, end), index, reason in zip(
            row["turns"], answers[-len(row["turns"]) :], row["finish_reasons"], strict=True
        ):
            ids = {"prompt_ids": row["input_ids"][:start], "output_ids": row["input_ids"][start:end]}
            how = {"finish_reason": {"type": reason, "matched": None}, **ids}
            answer = row["messages"][index] | {key: how[key] for key in made}
            yield {"messages": [*row["messages"][:index], answer]}, ids, reason


@pytest.mark.parametrize("made", [("prompt_ids", "output_ids", "finish_reason"), ("finish_reason",)])
def test_the_targets_own_answers_come_back_by_ids_as_they_were_and_by_text_with_their_end(
    target, chat, out_dir, tmp_path, made
):
    run(target, chat, out_dir, max_new_tokens=10, temperature=0.0)
    reasons = set()
    for number, (raw, ids, reason) in enumerate(made_elsewhere(read_answer_rows(out_dir), made)):
        messages = read_messages(raw, keep_answers=True)
        again = write_prompts(tmp_path / str(number), [prompt("x") | {"messages": messages}])
        run(target, chat, again, imported="stop")
        row = list(read_answer_rows(again).values())[-1]
        ((start, end),) = row["turns"]
        answer_ids = row["input_ids"][start:end]
        assert row["input_ids"][:start] == ids["prompt_ids"] and row["seeds"] == [None]
        assert target.tokenizer.decode(answer_ids) == target.tokenizer.decode(ids["output_ids"])
        assert answer_ids == ids["output_ids"] or "output_ids" not in made
        assert row["finish_reasons"] == [reason] and (answer_ids[-1] in target.stop_ids) == (reason == "stop")
        reasons.add(reason)
    assert reasons == {"stop", "length"}


def test_another_target_template_or_sampling_is_refused_by_name(target, out_dir, tmp_path):
    chat = tiny_chat(template_kwargs={"enable_thinking": False})
    run(target, chat, out_dir)
    with pytest.raises(InputError, match=r"sampling\.temperature=0\.7 then, 0\.1 now.*another out_dir, or delete"):
        run(target, chat, out_dir, temperature=0.1)
    with pytest.raises(InputError, match="differ in template"):
        run(target, shortening_chat(tmp_path), out_dir)
    variables = r"chat\.template_kwargs\.enable_thinking=False then, unset now.*\.thinking=unset then, True now"
    with pytest.raises(InputError, match=variables):
        run(target, tiny_chat(template_kwargs={"thinking": True}), out_dir)
    write_prompts(out_dir, list(read_jsonl(out_dir / "prompts/prompts.jsonl"))[:5])
    with pytest.raises(InputError, match="prompts_sha256"):
        run(target, chat, out_dir)


def test_other_stop_tokens_or_special_tokens_of_the_target_are_refused_unless_an_earlier_version_did_not_record_them(
    target, out_dir, tmp_path
):
    """The target's identity has neither: they are in generation_config.json and tokenizer_config.json."""
    (tmp_path / "bos.jinja").write_text("{{ bos_token }}" + target.tokenizer.chat_template)
    settings = ChatSettings(**SETTINGS | {"template": str(tmp_path / "bos.jinja")})

    def chat(bos, *stop_ids):
        tokenizer = AutoTokenizer.from_pretrained(ASSETS / "tiny", bos_token=bos)
        return Chat(tokenizer, settings, stop_ids={*target.stop_ids, *stop_ids})

    run(target, chat("<|endoftext|>"), out_dir)
    with pytest.raises(InputError, match=r"chat\.target_stop_ids=\[2\] then, \[1, 2\] now"):
        run(target, chat("<|endoftext|>", 1), out_dir)
    with pytest.raises(InputError, match=r"special_tokens\.bos_token=<\|endoftext\|> then, <\|im_start\|> now"):
        run(target, chat("<|im_start|>"), out_dir)
    now = read_answers(out_dir / "answers")
    earlier = {key: value for key, value in now.made_with.chat.items() if key not in RECORDED_LATER}
    then = replace(now, made_with=replace(now.made_with, chat=earlier))
    (out_dir / "answers/manifest.json").write_bytes(sealed_bytes(then))
    store = AnswerStore(out_dir, now.target, now.made_with)
    assert not store.pending and store.manifest.made_with.chat == earlier  # features of then continue


def test_a_run_that_ended_before_its_first_answer_ties_no_settings(target, chat, out_dir):
    class Unready(HuggingFaceAnswerer):
        def __enter__(self):
            raise InputError("the server does not start")

    sampling = Sampling(max_new_tokens=8, temperature=0.7, top_p=1.0, top_k=0)
    with pytest.raises(InputError, match="does not start"):
        answer_by(Unready(target=target, sampling=sampling, **BATCHES), target, chat, sampling, out_dir)
    assert run(target, chat, out_dir, temperature=0.1).rows == 7


@pytest.mark.parametrize("changed", ["sampling", "prompts", "answerer"])
def test_a_stage_without_any_answer_begins_again_with_other_settings(target, chat, out_dir, changed):
    failing = {"imported": "stop"} if changed == "answerer" else {"max_prompt_tokens": 2}
    with pytest.raises(InputError, match="nothing could be answered"):
        run(target, chat, out_dir, **failing)
    if changed == "prompts":
        write_prompts(out_dir, [prompt(9, QUICK[0])])
    assert read_answer_errors(out_dir)
    assert run(target, chat, out_dir, temperature=0.1).rows == (1 if changed == "prompts" else 7)
    assert read_answer_errors(out_dir) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 4096}, r"sampling\.max_new_tokens=4096 leaves no room"),
        ({"max_prompt_tokens": 2}, r"nothing could be answered \(.*max_prompt_tokens.*\); correct that and run again"),
        ({"imported": "stop"}, r"no assistant turn to import.*; drop answers=imported, or give rows"),
    ],
)
def test_bad_settings_name_their_key(target, chat, out_dir, changes, message):
    with pytest.raises(InputError, match=message):
        run(target, chat, out_dir, **changes)


def test_missing_prompts_and_answers_without_their_manifest_are_refused(target, chat, out_dir, tmp_path):
    with pytest.raises(InputError, match=r"prompts\.jsonl does not exist; make it with"):
        run(target, chat, tmp_path / "nowhere")
    run(target, chat, out_dir)
    (out_dir / "answers/manifest.json").unlink()
    with pytest.raises(InputError, match=r"answers\.jsonl has no manifest\.json .*delete .*/answers and run"):
        run(target, chat, out_dir, temperature=0.1)
