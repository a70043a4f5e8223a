"""The stage as a whole: what makes it run again, what a failing run leaves, and what is never written."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from prompt_stage import OUTPUTS, chat, default_settings, reasons, texts, users, write

from eagle3.errors import InputError
from eagle3.prompts.reading.sources import source_at
from eagle3.prompts.report import write_report
from eagle3.prompts.rules import Rules
from eagle3.prompts.stage import _write, prepare_prompts
from eagle3.settings.prompts import PromptSettings
from eagle3.settings.types import validated
from eagle3.storage.files import sha256_file, write_json


def test_prompts_are_made_again_only_when_something_changed(prepare, tmp_path, caplog):
    caplog.set_level("INFO")

    def made(rows=None, **config) -> bool:
        caplog.clear()
        prepare(rows, **config)
        return "up to date" not in caplog.text

    path = str(tmp_path / "chats.jsonl")
    assert made([chat("a", "x")])
    (prepare.folder / ".work").mkdir()  # a run was killed while it removed it
    assert not made(path=path)
    assert not (prepare.folder / ".work").exists()
    assert made(path=path, limit=5)
    assert made(path=path, limit=5, keep_answers=True)
    assert made(path=path)
    assert made([chat("a", "x"), chat("b", "y")])
    assert made(path=path, attribution="Chats by Anna")
    credits = (prepare.folder / "attribution.txt").read_text()
    assert "Chats by Anna" in credits
    assert credits.startswith(
        "The prompts come from these sources. Only user and system turns were taken, and with prompts.tools=keep "
        "definitions, calls and results of tools; some were changed.\n\n"
    )
    assert made(path=path)
    (prepare.folder / "prompts.jsonl").write_bytes(b"")
    assert made(path=path)
    assert len(prepare.prompts()) == 2
    assert made([{"prompt": "a"}], license="MIT")
    assert made(path=path, license="ISC")
    # The key looks like that of a secret, whose value no file shows.
    actions = default_settings()["privacy"]["actions"] | {"PASSWORD": "keep"}
    assert made(path=path, license="ISC", privacy={"actions": actions})


def test_rows_that_are_added_while_the_stage_runs_are_read_by_the_next_run(prepare, tmp_path, monkeypatch, caplog):
    def writes_and_grows(*arguments):
        written = _write(*arguments)
        write(tmp_path / "chats.jsonl", [chat("a"), chat("b")])
        return written

    with monkeypatch.context() as patch:
        patch.setattr("eagle3.prompts.stage._write", writes_and_grows)
        prepare([chat("a")])
    said = caplog.text
    prepare(path=str(tmp_path / "chats.jsonl"))
    assert texts(prepare) == ["a", "b"]
    assert "changed while it was read; the next run" in said


def test_a_changed_card_makes_the_prompts_again(prepare, tmp_path, caplog):
    caplog.set_level("INFO")
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder / "a.jsonl", [chat("a")])
    for text in ("pretty_name: Chats\n---", "pretty_name: Talks\n---", "homepage: https://acme\n---\n# Citation\nX"):
        (folder / "README.md").write_text(f"---\n{text}")
        prepare(path=str(folder))
    assert "up to date" not in caplog.text
    prepare(path=str(folder))
    assert "up to date" in caplog.text


def test_a_failing_run_leaves_the_earlier_prompts_whole(prepare, tmp_path):
    prepare([chat("a")])
    before = prepare.outputs()
    entries = [{"path": str(tmp_path / "chats.jsonl")}, {"path": str(write(tmp_path / "bad.parquet", ["PAR1"]))}]
    with pytest.raises(InputError, match="damaged"):
        prepare(sources=entries)
    assert prepare.outputs() == before


@pytest.mark.parametrize(
    ("rows", "config", "message"),
    [
        ([{"prompt": "a"}, {"prompt": "b"}, "broken"], {},
         r"none of 3 rows in chats passed \(license missing: 2.*prompts=in_house"),
        ([], {}, r"none of 0 rows in chats passed \(the sources are empty\); give rows with messages"),
        ([chat("a", license=None), {"x": 1}, {"x": 2}], {}, r"prompts: 2, license missing: 1\); say which column"),
        ([chat("a", source="ShareGPT")], {}, r"\(ShareGPT: 1\)\); .*licenses\.cleared=\[\"ShareGPT\"\]"),
        ([chat("a", answers=1)], {"keep_answers": True}, r"no assistant turn: 1\); give rows with answers"),
        ([chat("longer than five")], {"length": {"max_characters": 5}},
         r"more than 5 characters: 1\); .*change what refuses these \(conf/prompts\)"),
        (["a", "b", "c"], {}, r"not a JSON object: 3\); write one object a line.* CSV, "),
        ([{"prompt": "a", "history": [["b", "c"]]}], {}, r"row with history: 1\); .*prompts\.fields\.attachments="),
        ([{"body": {"input": "a", "tools": [{"name": "f"}]}}], {}, r"row with body\.tools: 1\); prompts\.tools=keep"),
        ([{"inputs": {"question": "a"}}] * 2, {}, r"inputs is neither text nor a list: 2\); .*prompt=COLUMN\.PART"),
        ([{"messages": [{"role": "user", "message": "a"}]}], {}, r"turn without content: 1\); .*fields\.content=KEY"),
        ([{"data": ["a", "b"]}], {}, r"no column of .*'\+prompts\.fields\.messages=COLUMN' for a list of turns"),
        ([{"messages": [{**users("a")[0], "files": ["x"]}]}], {}, r"turn with files: 1\); .*fields\.attachments="),
        ([{"instruction": "a", "instances": [{"input": "b"}]}], {}, r"row with instances: 1\); write each instance"),
        ([{"question": "a", "api_list": [{"api_name": "f", "required_parameters": []}]}], {},
         r"\(api_list: 1\)\); call the column api_list tools and set prompts\.tools=keep"),
        ([{"messages": [{"role": "user", "content": [{"type": "image"}]}]}], {},
         r"content with parts other than text: 1\); give rows of text"),
        ([{"answer_id": 1, "text": "a"}], {}, r"text of an answer, .*: 1\); give the file of the questions"),
        ([{"question": [users("a")]}] * 2, {}, r"question holds something other than turns: 2\); write each turn as"),
        ([{"messages": [{"role": "Kundin", "content": "a"}]}], {},
         r"unknown role: 1 \(Kundin: 1\)\); .*prompts\.roles=\{Kundin: user\}"),
    ],
)  # fmt: skip
def test_no_prompt_left_is_an_error_with_counts_and_advice_on_the_commonest_reason(prepare, rows, config, message):
    with pytest.raises(InputError, match=message):
        prepare(rows, **config)
    assert not any((prepare.folder / name).exists() for name in OUTPUTS)


def test_no_text_of_a_refused_row_is_written_or_logged(prepare, caplog, capfd):
    caplog.set_level("DEBUG")
    secret = "CONFIDENTIAL"
    rows = [
        chat("fine"),
        f'{{"prompt": "{secret}',
        {"messages": [{"role": "jane@acme.com", "content": secret}]},
        {"prompt": "with more", "license": "MIT", "jane@acme.com": secret, "metadata": {"mood": secret}},
        {"messages": users([{"type": secret, secret: secret}])},
        {secret: secret},
        chat(secret, license=None),
        chat(secret, license="our own terms"),
        chat(secret, license="ask jane@acme.com"),
        {"messages": [*users(secret), {"role": "tool", "content": secret}]},
    ]
    ledger = prepare(rows)
    assert ledger["prompts"] == 2 and ledger["rows"] == len(rows)
    assert "left out: " in caplog.text and "as read: column not read: " in caplog.text
    written = "".join((prepare.folder / name).read_text(errors="replace") for name in OUTPUTS)
    output = capfd.readouterr()
    assert secret not in written + caplog.text + output.out + output.err
    # Names of licences, roles and columns are what people need to see, but never anybody's address.
    assert "our own terms" in (prepare.folder / "report.md").read_text()
    assert "| column not read: metadata.mood | 1 |" in (prepare.folder / "report.md").read_text()
    assert "jane" not in written


def test_the_package_imports_without_torch():
    code = "import sys, eagle3.prompts; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_id_or_source_that_is_personal_data_is_written_nowhere(prepare):
    email = "anna.berg@web.de"
    rows = [chat("one", id=email), chat("no licence", id=f"{email}-2", license=None), "broken " + email]
    rows += [chat("two", id="plain-7", source=email), chat("three", source=f"sharegpt {email}")]
    prepare(rows)
    assert [len(prompt["id"]) for prompt in prepare.prompts()] == [16, len("plain-7")]
    assert prepare.prompts()[1]["id"] == "plain-7"
    # A forbidden source is refused also when its name holds personal data.
    assert len(prepare.rejects()) == 3 and reasons(prepare)[2].startswith("source forbidden: ShareGPT")
    assert all(email.encode() not in content for content in prepare.outputs().values())


# The report


def test_names_that_would_break_a_table_do_not_and_many_licences_are_summed_up(prepare, tmp_path):
    names = ("MIT", "ISC", "0BSD", "Unlicense")
    pairs = [f"{one} AND {other}" for one in names for other in names if one != other]
    rows = [chat(f"q {index}", license=license) for index, license in enumerate((*names, *pairs, "GPL-3.0-only"))]
    path = str(write(tmp_path / "chats.jsonl", rows))
    prepare(sources=[{"path": path, "name": name} for name in ("a|b", "$x_1$ und $", "数据", "é" * 200)])
    report = (prepare.folder / "report.md").read_text()
    assert "| a\\|b | 17 | 16 | 94.1% |" in report and "| a\\|b | 4 other combinations | 4 |" in report
    assert "| 数据 | exact duplicate of another source | 16 |" in report
    assert "license not allowed: GPL-3.0-only" in report


def test_the_report_is_made_from_the_ledger_alone_which_accounts_for_every_row(prepare, tmp_path):
    rows = [chat("mail me at jane.doe@acme-corp.io"), "broken", chat("no licence", license=None)]
    rows += [chat("a"), chat("A"), chat("b", id=1), chat("c", id=1), chat("d"), chat("e")]
    prepare(rows, limit=3)
    ledger = json.loads((prepare.folder / "ledger.json").read_text())
    [source] = ledger["sources"].values()
    assert (ledger["rows"], ledger["prompts"], len(prepare.rejects())) == (9, 3, 6)
    assert source["rows"] == source["prompts"] + sum(source["rejected"].values())
    write_report(tmp_path / "again", ledger)
    report = (prepare.folder / "report.md").read_text()
    assert (tmp_path / "again" / "report.md").read_text() == report
    assert "| chats | EMAIL_ADDRESS | 1 |" in report and "jane" not in report
    assert "Policy `patterns`. Identifiers and secrets were looked for" in report
    assert (
        "**NOT detected: COORDINATES, LOCATION, ORGANIZATION, PERSON, STREET_ADDRESS; detected only in part" in report
    )


def test_answers_of_which_nothing_says_to_what_prompts_are_are_not_replaced(prepare):
    prepare([chat("a")])
    write_json(prepare.out_dir / "answers" / "manifest.json", {})
    with pytest.raises(InputError, match="are to other prompts than these would be"):
        prepare([chat("b")])


def test_answered_prompts_are_not_replaced_by_others(prepare, tmp_path):
    prepare([chat("a"), chat("b"), chat("c", license="ISC")])
    manifest = {"complete": True, "prompts_sha256": sha256_file(prepare.folder / "prompts.jsonl")}
    write_json(prepare.out_dir / "answers" / "manifest.json", manifest)
    before, path = prepare.outputs(), str(tmp_path / "chats.jsonl")
    other = str(write(tmp_path / "other.jsonl", [chat("d")]))
    fix = r"another out_dir, .*'stages=\[answers,features\]'.*delete .*answers to generate answers again.*are lost"
    for config in ({"path": path, "limit": 1}, {"path": path, "licenses": {"allowed": ["MIT"]}}, {"path": other}):
        with pytest.raises(InputError, match=f"are to other prompts than these would be.*{fix}"):
            prepare(**config)
        assert prepare.outputs() == before
    assert prepare(path=path, limit=5)["inputs"]["limit"] == 5  # the same prompts


class Growing:
    """A source that gets a row whenever more are wanted."""

    def __init__(self, path, number):
        self.path, self.number, self.rows = path, number, []

    def source(self):
        source = source_at("growing", str(write(self.path, self.rows)))
        return source if self.rows else replace(source, files=[])

    def wanted(self, others):
        return self.number

    def grow(self, kept, wanted, refused):
        self.rows.append(chat(f"question {len(self.rows)}"))


def test_a_source_whose_prompts_are_answered_gets_no_more_rows(prepare, tmp_path):
    growing = Growing(tmp_path / "growing.jsonl", 2)

    def grown():
        settings = validated(PromptSettings, default_settings())
        rules = Rules(settings, privacy=settings.privacy.build())
        return prepare_prompts(settings, rules, keep_answers=False, out_dir=prepare.out_dir, growing=growing)

    assert grown()["prompts"] == 2
    growing.number = 3
    assert grown()["prompts"] == 3
    manifest = {"complete": True, "prompts_sha256": sha256_file(prepare.folder / "prompts.jsonl")}
    write_json(prepare.out_dir / "answers" / "manifest.json", manifest)
    growing.number = 4
    with pytest.raises(InputError, match="are to other prompts than these would be"):
        grown()
    assert len(growing.rows) == 3
