"""The benchmark of the privacy check on texts of others reads what the check returns."""

import json
import sys
from pathlib import Path

import privacy_others
import pytest


def test_secrets_in_prose_and_harmless_texts_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"text": "my password is hunter2secret!", "start": 15, "end": 29}, {"text": "I forgot my password"}]
    (tmp_path / "prose.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = ["--prose", f"{tmp_path}/prose.jsonl", "--harmless", "3", "--out", f"{tmp_path}/out.json"]
    monkeypatch.setattr(sys, "argv", ["privacy_others.py", *given])
    privacy_others.main()
    sources = json.loads((tmp_path / "out.json").read_text())["sources"]
    assert sources["passwords in prose"]["a secret"]["found"] == 1
    assert sources["passwords in prose"]["harmless"]["passed"] == 1
    assert sources["packages' descriptions"]["harmless"]["texts"] == 3
