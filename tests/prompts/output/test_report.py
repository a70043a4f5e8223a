"""The report for people who answer for the data: from the ledger alone, whatever names look like."""

import json
from pathlib import Path

from prompt_stage import Prepare, chat, prepare, write

from eagle3.prompts.output.report import write_report

__all__ = ["prepare"]


def test_names_that_would_break_a_table_do_not(prepare: Prepare, tmp_path: Path) -> None:
    path = write(tmp_path / "chats.jsonl", [chat("a"), chat("b"), chat("c", license="GPL-3.0-only")])
    entries = [{"path": str(path), "name": name} for name in ("a|b", "$x_1$ und $", "数据", "é" * 200)]
    prepare(sources=entries)
    report = (prepare.folder / "report.md").read_text()
    assert "| a\\|b | 3 | 2 | 66.7% |" in report
    assert "| 数据 | exact duplicate of another source | 2 |" in report
    assert "license not allowed: GPL-3.0-only" in report


def test_the_report_is_made_from_the_ledger_alone(prepare: Prepare, tmp_path: Path) -> None:
    prepare([chat("mail me at jane.doe@acme-corp.io"), chat("b"), "broken"])
    ledger = json.loads((prepare.folder / "ledger.json").read_text())
    write_report(tmp_path / "again", ledger)
    report = (prepare.folder / "report.md").read_text()
    assert (tmp_path / "again" / "report.md").read_text() == report
    assert "| chats | EMAIL_ADDRESS | 1 |" in report and "jane" not in report
    assert "Policy `patterns`. Identifiers and secrets were looked for" in report
    assert ledger["privacy"]["partly_seen"] == ["PASSWORD in prose"]
    assert "**NOT seen and let through: LOCATION, ORGANIZATION, PERSON, STREET_ADDRESS; seen only in part" in report


def test_every_row_is_in_the_books(prepare: Prepare) -> None:
    rows = [chat("a"), chat("A"), "broken", chat("b", license=None), chat("c", id=1), chat("d", id=1), chat("e")]
    ledger = prepare(rows, limit=3)
    for source in ledger["sources"].values():
        assert source["rows"] == source["prompts"] + sum(source["rejected"].values())
    assert ledger["rows"] == 7 and ledger["prompts"] == 3
    assert len(prepare.rejects()) == 4


def test_many_licences_are_summed_up(prepare: Prepare) -> None:
    names = ("MIT", "ISC", "0BSD", "Unlicense")
    pairs = [f"{one} AND {other}" for one in names for other in names if one != other]
    prepare([chat(f"q {index}", license=license) for index, license in enumerate((*names, *pairs))])
    assert "| chats | 4 other combinations | 4 |" in (prepare.folder / "report.md").read_text()
