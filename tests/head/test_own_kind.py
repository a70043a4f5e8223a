"""The block drafter of docs/how-to/own-head-kind.md: a kind outside the package, through every command of its page."""

import json
from pathlib import Path

import pytest
from page_commands import blocks, clone, own_rows, run_block, write_files
from scripts import finished, run_script
from stores import ROOT

PAGE = ROOT / "docs" / "how-to" / "own-head-kind.md"
OURS = ("--config-dir", "team/conf")
HEAD = "outputs/own_head"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone with the files of the page."""
    folder = clone(tmp_path_factory.mktemp("blocks"))
    (folder / "FILE.jsonl").write_text("".join(own_rows(24)))
    write_files(PAGE, folder)
    return folder


@pytest.fixture(scope="module")
def said(folder: Path) -> str:
    """What the commands of the page say."""
    [commands] = [block for block in blocks(PAGE) if block.is_command]
    status, output = run_block(commands.text, folder)
    assert status == 0, output
    return output


def test_a_block_drafter_trains_is_exported_checked_and_decodes_without_loss(folder, said):
    config = json.loads((folder / HEAD / "config.json").read_text())
    record = json.loads((folder / HEAD / "training.json").read_text())
    assert config["head_kind"] == record["kind"] == "blocks.Blocks"
    assert (config["block_size"], config["num_captured_layers"]) == (4, 5)
    assert record["accept_length"]["lossless"] in (1.0, None)
    decoded = next(json.loads(line) for line in said.splitlines() if line.startswith('{"accept_length"'))
    assert decoded["lossless"] == 1.0 and len(decoded["per_depth"]) == 4
    assert "reload" in said and "no server can serve heads of kind blocks.Blocks" in said
    card = (folder / HEAD / "README.md").read_text()
    assert "no server can serve heads of kind blocks.Blocks" in card and "sglang" not in card
    rows = json.loads((folder / "outputs/own_compared/compare.json").read_text())["rows"]
    assert rows and all(row["steps"] == 4 and row["verifications"] > 0 for row in rows)


@pytest.mark.usefixtures("said")
def test_what_the_kind_cannot_do_is_one_line(folder):
    serve = ["target.path=TARGET", f"head={HEAD}", "prompts.path=FILE.jsonl"]
    train = ["model=blocks", "data.path=outputs/five/features", "ttt_steps=7"]
    no_server, at_most = f"head={HEAD}: no server can serve heads of kind", ", of kind blocks.Blocks, drafts at most 4"
    for name, words, message in (
        ("serve", ["action=bench", *serve], no_server),
        ("serve", ["action=tune", *serve], no_server),
        ("serve", ["action=decode", *serve, "steps=5"], f"steps=5: {HEAD}{at_most}"),
        ("train", train, f"ttt_steps=7: the head{at_most}"),
        ("train", [*train, "model.block_size=0"], "model.block_size=0"),
    ):
        done = run_script(name, *OURS, *words, "hydra.run.dir=outputs/refused", cwd=folder)
        assert done.returncode == 1 and message in done.stderr, done.stderr
        assert done.stderr.count("error: ") == 1 and "Traceback" not in done.stderr
    (folder / "team/conf/model/slip.yaml").write_text("defaults: [eagle32, _self_]\n")
    done = run_script("train", *OURS, "model=slip", "data.path=outputs/five/features", cwd=folder)
    assert "model/slip.yaml: its defaults name model/eagle32, which is no option" in done.stderr
    done = run_script("serve", "action=check", *serve[:2], cwd=folder)  # where the module is not found
    assert done.returncode == 1 and "model.kind=blocks.Blocks" in done.stderr and "--config-dir" in done.stderr


@pytest.mark.usefixtures("said")
def test_a_training_starts_from_the_exported_head_with_keys_of_the_command_line_alone(folder):
    path = {"PYTHONPATH": f"{ROOT}:{folder}/team"}
    given = ["data.path=outputs/five/features", "data.val_fraction=0.2", "trainer.precision=32-true", "ttt_steps=3"]
    model = ["model.kind=blocks.Blocks", "+model.block_size=4", f"init_from={HEAD}"]
    train = [*given, *model, "trainer.max_epochs=1", "hydra.run.dir=outputs/again"]
    finished("train", *train, cwd=folder, env=path)
    assert (folder / "outputs/again/result.json").is_file()
    done = run_script("train", *train, "model.num_heads=2", "hydra.run.dir=outputs/wrong", cwd=folder, env=path)
    assert done.returncode == 1 and "model.num_heads=2 is not a key of model.kind=blocks.Blocks" in done.stderr
