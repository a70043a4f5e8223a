"""Secrets by kingfisher: its real binary where it is installed, and scripts that behave as a broken one would."""

import base64
import os
import pickle
import random
import stat
import string
import sys
import tempfile
from pathlib import Path

import pytest
from prompt_stage import OUTPUTS, Prepare, chat, default_settings, prepare

from eagle3.errors import InputError
from eagle3.prompts.privacy.kingfisher import ARGUMENTS, PACKAGE, Kingfisher
from eagle3.prompts.rules import GROUPS, Rules
from tests.prompts.privacy.test_policy import build_privacy, contents, prompt

__all__ = ["prepare"]

OWN = ("API_KEY", "PASSWORD", "TOKEN")  # entities of the recognisers that see the same
LETTERS = string.ascii_letters + string.digits


def token(seed: int = 0) -> str:
    return "ghp_" + "".join(random.Random(seed).choices(LETTERS, k=36))


def only_kingfisher(action: str):
    own = (f"privacy.actions.{entity}=null" for entity in OWN)
    return build_privacy("privacy.kingfisher=package", f"privacy.actions.SECRET={action}", *own)


@pytest.fixture(scope="module")
def kingfisher() -> Kingfisher:
    pytest.importorskip("kingfisher")
    return Kingfisher(PACKAGE)


@pytest.mark.parametrize(
    "text",
    [
        "{}", "ünï €𝄞 東京 {} ends", "a\r\nb\r\n  {}\r\n", "one\x85line\u2028of\x0cmany {}\n\n", "{} and once more {}",
        "\ufeff{}", "PK\x03\x04 {}", "nul \0 {}", "kingfisher:ignore {}", "a\n\n\n\tü {}\nb",
    ],
)  # fmt: skip
def test_each_finding_is_exactly_the_secret(kingfisher: Kingfisher, text: str) -> None:
    text = text.replace("{}", token())
    assert [text[span.start : span.end] for span in kingfisher.find(text)] == [token()] * text.count(token())


def test_an_encoded_secret_is_found_as_the_encoded_text(kingfisher: Kingfisher) -> None:
    encoded = base64.b64encode(f"login with {token()} please".encode()).decode()
    text = f"ü data: {encoded} end"
    assert [text[span.start : span.end] for span in kingfisher.find(text)] == [encoded]


def test_texts_that_are_read_together_are_found_as_if_each_were_alone(kingfisher: Kingfisher) -> None:
    texts = ["nothing", f"a {token(1)}", "", f"a {token(1)}", f"{token(2)}\nb", token(2)[:20], token(2)[20:]]
    kingfisher.look_ahead(texts)
    together = [kingfisher.find(text) for text in texts]
    alone = [Kingfisher(PACKAGE).find(text) for text in texts]
    assert together == alone
    assert [len(found) for found in together] == [0, 1, 0, 1, 1, 0, 0]


def test_a_group_of_prompts_is_one_call_and_masks_stay_in_their_places(monkeypatch) -> None:
    pytest.importorskip("kingfisher")
    masking = only_kingfisher("mask")
    calls = []
    run = Kingfisher._run
    monkeypatch.setattr(Kingfisher, "_run", lambda self, *given: calls.append(given[0]) or run(self, *given))
    group = [prompt(f"ü {token(1)} x", "ok", f"and {token(2)}"), prompt("nothing"), prompt(token(3))]
    masking.look_ahead(group)
    verdicts = [masking(each) for each in group]
    assert calls == ["scan"]
    assert contents(verdicts[0].prompt) == ["ü <SECRET> x", "ok", "and <SECRET>"]
    assert (verdicts[1].prompt, contents(verdicts[2].prompt)) == (None, ["<SECRET>"])


def test_the_stage_is_the_same_in_chunks_of_any_size_and_counts_each_finding(prepare: Prepare) -> None:
    pytest.importorskip("kingfisher")
    rows = [
        chat(f"question {n}: " + (f"why does {token(n)} fail" if n % 10 == 0 else "hello"), id=n) for n in range(60)
    ]
    privacy = default_settings()["privacy"]
    actions = privacy["actions"] | dict.fromkeys(OWN)
    settings = {"privacy": {"kingfisher": "package", "actions": actions}, "duplicates": {"near": False}}
    ledger = prepare(rows, **settings)
    [source] = ledger["sources"].values()
    assert source["rejected"] == {"personal data: SECRET": 6} and source["found"]["privacy"] == {"SECRET": 6}
    assert ledger["inputs"]["rules"]["made_with"] == [Kingfisher(PACKAGE).made_with()]
    whole = [(prepare.folder / name).read_bytes() for name in OUTPUTS if name.endswith("jsonl")]
    assert not any(token(n).encode() in content for n in range(0, 60, 10) for content in whole)
    for path in (prepare.folder / "ledger.json", prepare.folder / "prompts.jsonl"):
        path.unlink()
    prepare(rows, **settings, chunk_mb=0.003)
    assert [(prepare.folder / name).read_bytes() for name in OUTPUTS if name.endswith("jsonl")] == whole


def test_it_goes_to_another_process_without_what_it_found(kingfisher: Kingfisher) -> None:
    kingfisher.look_ahead([f"a {token(7)}"])
    assert token(7).encode() not in pickle.dumps(kingfisher)


def script(path: Path, *, version: str = "kingfisher 2.14.0", scan: str = "") -> Path:
    """A binary that tells its version, and runs `scan` (Python) when it is asked to scan."""
    path.write_text(
        f"#!{sys.executable}\nimport sys, os, json, stat\n"
        f"if sys.argv[1] == '--version':\n    print({version!r})\n    sys.exit()\n"
        f"folder = sys.argv[2]\n{scan}\n"
    )
    path.chmod(0o700)
    return path


AUDIT = "print(json.dumps({'audit': {'repositories': [{'stats': {'blobs_scanned': %s}}]}}))"


def test_texts_lie_where_their_owner_alone_can_enter_and_go_afterwards(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("KINGFISHER_ALERT_REPORT_URL", "https://example.com")
    seen = tmp_path / "seen.json"
    scan = (
        "told = [oct(stat.S_IMODE(os.stat(folder).st_mode)), sys.argv[3:], sorted(os.environ)]\n"
        f"json.dump(told, open({str(seen)!r}, 'w'))\n" + AUDIT % 1
    )
    binary = script(tmp_path / "binary", scan=scan)
    assert Kingfisher(str(binary)).find("text") == []
    assert "--no-validate" in ARGUMENTS and "--no-update-check" in ARGUMENTS
    assert '"0o700"' in seen.read_text() and "--no-validate" in seen.read_text()
    assert "ALERT" not in seen.read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["binary", "seen.json"]
    assert stat.S_IMODE(os.stat(binary).st_mode) == 0o700


@pytest.mark.parametrize(
    ("scan", "message"),
    [
        ("sys.exit(1)", r"did not read the texts \(exit code 1, 0 of 1 texts read\)"),
        (AUDIT % 0, r"\(exit code 0, 0 of 1 texts read\); check that TMPDIR"),
        ("print('my secret')", r"\(JSONDecodeError\)"),
    ],
)
def test_a_scan_that_fails_is_one_line_without_the_text(tmp_path, scan: str, message: str) -> None:
    broken = Kingfisher(str(script(tmp_path / "binary", scan=scan)))
    with pytest.raises(InputError, match=message) as error:
        broken.find("my secret")
    assert "my secret" not in str(error.value)


@pytest.mark.parametrize("version", ["kingfisher 2.13.9", "kingfisher 3.0.0", "bird 7", ""])
def test_a_version_that_is_not_known_is_refused_before_any_row(tmp_path, version: str) -> None:
    with pytest.raises(InputError, match=r"kingfisher=.* calls itself .*from 2\.14 and below 3"):
        Kingfisher(str(script(tmp_path / "binary", version=version)))


def test_a_missing_binary_or_package_says_how_to_go_on(tmp_path, monkeypatch) -> None:
    with pytest.raises(InputError, match=r"privacy\.kingfisher=.* cannot be run \(FileNotFoundError\)"):
        Kingfisher(str(tmp_path / "none"))
    monkeypatch.setitem(sys.modules, "kingfisher", None)
    message = r"needs the package kingfisher-bin; .*'\.\[kingfisher\]'.*go without: prompts\.privacy\.kingfisher=null"
    with pytest.raises(InputError, match=message):
        Kingfisher(PACKAGE)


def test_another_version_makes_the_prompts_again(tmp_path) -> None:
    def inputs(version: str) -> dict:
        binary = script(tmp_path / "binary", version=f"kingfisher {version}")
        privacy = build_privacy(f"privacy.kingfisher={binary}")
        return Rules({group: default_settings()[group] for group in GROUPS}, privacy=privacy).inputs()

    assert inputs("2.14.0") == inputs("2.14.0") != inputs("2.14.1")
    assert "made_with" not in Rules({g: default_settings()[g] for g in GROUPS}, privacy=build_privacy()).inputs()
