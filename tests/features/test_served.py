"""Features captured in an engine are those of Hugging Face, and a wrong layer, row or order stops the run.

The engine is a stand-in that calls modules as SGLang does; the hooks, servers, files and checks are the real ones.
"""

import asyncio
import json
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import defaults
import eagle3_capture
import pytest
import torch
from exported_head import edit_json
from extraction import conversation, extract_by, write_answers
from safetensors.torch import load_file, save_file
from serving_fixtures import environment, launch_settings, sglang_site
from stores import assert_same_samples, open_store

from eagle3.engine import capture
from eagle3.engine.capture import Captured, CaptureFolder, Wanted
from eagle3.errors import InputError
from eagle3.features.build import sentinels_for
from eagle3.features.capture_check import Sentinel, check_against_engine, computed_sentinels, plain_sentinels
from eagle3.features.huggingface import HuggingFaceExtractor
from eagle3.features.manifest import Manifest
from eagle3.features.sample import scaled
from eagle3.features.served import ServedExtractor, require_memory
from eagle3.features.turns import find_answer_spans
from eagle3.settings.precomputing import TargetSettings
from eagle3.target.facts import LogitTransform
from eagle3.target.model import Target
from eagle3.target.stored import StoredTarget, stored_target

ENGINE: dict[str, Any] = {
    "required": True, "servers": 1, "memory_gb": 0.5, "timeout_s": 600, "attempts": 3, "give_up_s": 60,
}  # fmt: skip
STAGE: dict[str, Any] = {"path": None, "max_length": 64, "too_long": "truncate", "reasoning": None, "shard_mb": 512}
LAYERS = [2, 4, 5]  # of the bundled target

Run = Callable[..., Manifest]
Served = Callable[..., ServedExtractor]


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("memory")


@pytest.fixture(scope="module")
def served(target: Target, stored: StoredTarget, memory: Path, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """An extractor whose servers have not started yet."""
    sentinels = computed_sentinels(target, LAYERS)

    def make(*, version: str = "0.5.23", fault: str = "", **changes: Any) -> ServedExtractor:
        folder = tmp_path_factory.mktemp("server")
        site = sglang_site(folder, version)
        parts: dict[str, Any] = {"layers": LAYERS, "dtype": "float32", "teachers": "answers", "batch_tokens": 16}
        parts |= {"folder": folder / "logs", "sentinels": sentinels}
        parts["launch"] = launch_settings(site, check=False, env=environment(site, fault))
        engine = ENGINE | {"memory": str(memory)}
        engine |= {key: changes.pop(key) for key in engine if key in changes}
        return ServedExtractor(defaults.capture(**engine), target=stored, **parts | changes)

    return make


@pytest.fixture(scope="module")
def first(served: Served) -> Iterator[ServedExtractor]:
    """One with a server of SGLang 0.5.23, which other extractors may ask too."""
    with served() as extractor:
        yield extractor


@pytest.fixture
def run(target: Target, stored: StoredTarget, served: Served, tmp_path: Path) -> Run:
    rows = [conversation(number, 3 + number % 5, 2 + number * 7 % 30) for number in range(24)]

    def extract(name: str, *, teachers: str = "answers", dtype: str = "float32", **changes: Any) -> Manifest:
        out_dir = tmp_path / name
        out_dir.mkdir(exist_ok=True)
        write_answers(out_dir, target.identity, rows)
        extractor: Any
        if name == "plain":
            parts: dict[str, Any] = {"layers": LAYERS, "teachers": teachers, "batch_tokens": 16}
            extractor = HuggingFaceExtractor(target=target, dtype=torch.float32, **parts)
        else:
            extractor = served(teachers=teachers, dtype=dtype, **changes)
        settings = {"capture_layers": LAYERS, "target_dtype": "float32", "dtype": dtype, "teachers": teachers, **STAGE}
        captured_by = "huggingface" if name == "plain" else "sglang"
        return extract_by(extractor, stored, out_dir, captured_by=captured_by, **settings)

    return extract


def test_the_store_of_an_engine_is_that_of_hugging_face(run, first, tmp_path):
    plain, served = run("plain", teachers="all"), run("served", teachers="all", running=first.running)
    assert (plain.samples, plain.tokens, plain.left_out) == (served.samples, served.tokens, served.left_out)
    assert served.made_from.captured_by == "sglang" and served.target_config == plain.target_config
    stores = [open_store(tmp_path / name / "features") for name in ("plain", "served")]
    assert_same_samples(*stores, tolerance=1e-4)
    for ours, theirs in zip(*(store.samples for store in stores), strict=True):
        assert torch.equal(stores[0].read(ours).teacher_argmax, stores[1].read(theirs).teacher_argmax)
    assert all(torch.equal(*pair) for pair in zip(*(store.target_weights() for store in stores), strict=True))


def test_hooks_on_layers_give_the_same_and_what_hooks_pack_in_fp8_is_what_this_process_would(run, memory, tmp_path):
    before = {*memory.iterdir()}
    run("plain")
    run("served", dtype="fp8", version="0.5.20")
    plain, served = (open_store(tmp_path / name / "features") for name in ("plain", "served"))
    for one, other in zip(plain.samples, served.samples, strict=True):
        ours, theirs = plain.read(one), served.read(other)
        assert ours.id == theirs.id and torch.equal(ours.teacher_argmax, theirs.teacher_argmax)
        packed = scaled(ours.aux_hidden_states, 3)
        same = (theirs.aux_hidden_states.values == packed.values).float().mean()
        assert same > 0.99  # but where the engine rounds otherwise
        assert torch.equal(theirs.aux_hidden_states.exponents, packed.exponents)
        assert theirs.last_hidden_state.exponents.shape == (len(ours.last_hidden_state), 1)
    assert {*memory.iterdir()} == before


def test_a_version_that_hides_the_states_is_refused_before_a_server_starts(served):
    extractor = served(version="0.5.21")
    with pytest.raises(InputError, match=r"SGLang 0\.5\.21: .*; install SGLang 0\.5\.17"), extractor:
        pass
    assert not extractor.folder.exists()


def test_states_that_are_not_the_targets_are_found_by_hugging_faces_forward_or_else_by_the_engines_logits(
    first, stored, monkeypatch
):
    [one, *_] = first.sentinels
    assert one.states is not None and one.last is not None
    further = {layer: (2 if layer in LAYERS else 9) * state for layer, state in one.states.items()}
    shifted = {layer: one.states.get(layer + 1, state) for layer, state in one.states.items()}
    for states, last, message in [
        (one.states, 2 * one.last, r"are 50% apart from Hugging Face's: another quantisation, revision"),
        (further, one.last, r"are 50% apart from Hugging Face's: another quantisation, revision"),
        (shifted, one.last, r"for layer 2 of .* is nearer to Hugging Face's layer 1"),
    ]:
        with pytest.raises(InputError, match=message):
            check_against_engine(first.engines.ask, [Sentinel(one.input_ids, states, last)], stored, LAYERS)
    assert check_against_engine(first.engines.ask, plain_sentinels(stored), stored, LAYERS) == LogitTransform()
    monkeypatch.setitem(stored.__dict__, "lm_head", stored.lm_head.flip(0))
    with pytest.raises(InputError, match="does not give the engine's own logits"):
        check_against_engine(first.engines.ask, plain_sentinels(stored), stored, LAYERS)


def test_a_target_that_hugging_face_cannot_load_is_held_against_the_engine_alone(tiny_path, tmp_path, caplog):
    folder = shutil.copytree(tiny_path, tmp_path / "quantised")
    edit_json(folder / "config.json", quantization_config={"quant_method": "awq", "bits": 4})
    options = {"path": str(folder), "revision": None, "trust_remote_code": False}
    settings = TargetSettings(**options, dtype="auto", device="cpu", attention=None, check_health=False)
    sentinels = sentinels_for(settings, stored_target(**options), LAYERS)
    assert [each.states for each in sentinels] == [None] * 3
    assert "no forward of Hugging Face: target.path" in caplog.text


def test_weights_that_are_not_whole_end_the_run_though_an_engine_would_load_them(tiny_path, tmp_path):
    folder = shutil.copytree(tiny_path, tmp_path / "cut")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.3.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    options = {"path": str(folder), "revision": None, "trust_remote_code": False}
    settings = TargetSettings(**options, dtype="auto", device="cpu", attention=None, check_health=False)
    with pytest.raises(InputError, match=r"lacks 1 weights"):
        sentinels_for(settings, stored_target(**options), LAYERS)


def test_a_server_that_dies_ends_the_run_with_its_reason(run, monkeypatch):
    monkeypatch.setattr(capture, "ROWS_S", 1.0)  # it may die between an answer and its rows
    with pytest.raises(InputError, match=r"server 0 has ended \(exit status .*is kept: run the same command again"):
        run("served", fault="12", attempts=100)


def captured_tokens(extractor: ServedExtractor) -> int:
    captured, _ = extractor.engines.ask([5, 6, 7], [(0, 3)]).result()
    return len(captured.aux)


def test_two_runs_on_one_machine_leave_each_others_memory_alone(served, first, memory):
    with pytest.raises(InputError, match=r"launch\.port=\d+: Address already in use"), served(launch=first.launch):
        pass
    [folder] = memory.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    with served() as second:  # on another port
        assert captured_tokens(second) == captured_tokens(first) == 3
    assert [*memory.iterdir()] == [folder] and captured_tokens(first) == 3


def test_another_process_of_the_host_asks_the_same_servers_and_gets_its_own_rows(served, first, memory):
    prompts = [[*range(5, 9 + number)] for number in range(12)]
    with served(running=first.running) as other:
        assert other.logit_transform() == first.logit_transform()
        asked = [(each.engines.ask(ids, [(0, 4)]), ids) for ids in prompts for each in (first, other)]
        for (ours, ids), (theirs, _) in zip(asked[::2], asked[1::2], strict=True):
            (one, _), (same, _) = ours.result(), theirs.result()
            assert len(one.aux) == len(ids) and torch.equal(one.aux, same.aux)
    assert captured_tokens(first) == 3  # it still runs
    assert not [*memory.rglob("*.safetensors"), *memory.rglob("*.tmp")]


def test_memory_must_hold_the_states_of_all_servers_before_one_starts(served, tmp_path, monkeypatch):
    extractor = served(servers=3, memory=str(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(total=2**30, free=2**30))
    with pytest.raises(InputError, match=r"memory=.* 1\.0 GB .*memory_gb is 0\.5 .*\(3\); .*-size=2g"), extractor:
        pass
    assert not extractor.folder.exists() and [*tmp_path.iterdir()] == []


def test_memory_must_be_there_and_hold_the_states_of_other_workers_on_this_machine(tmp_path, monkeypatch):
    with pytest.raises(InputError, match=r"features\.engine\.memory=.*none: No such file"):
        require_memory(tmp_path / "none", 1)
    most = 2**30  # which the other worker has written; this one has room for its own
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(total=2 * most, free=most))
    for _ in range(2):
        CaptureFolder.new(tmp_path)
        require_memory(tmp_path, most)
    CaptureFolder.new(tmp_path)
    with pytest.raises(InputError, match=r"memory_gb is 1 for each server on this machine \(3\)"):
        require_memory(tmp_path, most)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(total=9 * most, free=most // 2))
    with pytest.raises(InputError, match=r"memory=.* has 0\.5 GB free"):  # other programs have taken it
        require_memory(tmp_path, most)


@pytest.mark.parametrize("marks", [[0], [1], [0, 1, 1, 0, 1], [1, 0, 0, 1]])
def test_spans_are_where_a_mask_is_set_and_the_hooks_read_them_so(marks):
    mask = torch.tensor(marks, dtype=torch.bool)
    spans = find_answer_spans(mask.int())
    rid = f"eagle3:7:{','.join(f'{begin}-{end}' for begin, end in spans)}"
    places = mask.nonzero().flatten().tolist()
    assert eagle3_capture.teachers_in(rid, 0, len(marks)) == places
    assert eagle3_capture.teachers_in(rid, 1, 4) == [place for place in places if 1 <= place < 4]


def test_the_rows_of_each_client_go_to_its_own_folder():
    written: list[tuple[str, list[int], list[str]]] = []

    def put(client: str, tensors: dict[str, torch.Tensor], parts: list[dict[str, Any]]) -> None:
        assert tensors["last"].flatten().tolist() == {"a": [0], "b": [50, 60]}[client]
        written.append((client, tensors["aux"].flatten().tolist(), [part["id"] for part in parts]))

    writer = SimpleNamespace(config={"dtype": "float32", "slots": 1}, writes=True, put=put)
    rids = ["eagle3:a.0:0-1", "theirs", "eagle3:b.0:0-2", "eagle3:a.1:"]
    batch = SimpleNamespace(
        rids=rids,
        extend_seq_lens_cpu=[2, 3, 2, 1],
        extend_prefix_lens_cpu=[0] * 4,
        forward_mode=SimpleNamespace(is_extend=lambda: True),
    )
    rows = torch.arange(8.0)[:, None]
    eagle3_capture.write_rows(writer, [rows], 10 * rows, SimpleNamespace(weight=torch.ones(4, 1)), batch)
    assert written == [("a", [0, 1, 7], [rids[0], rids[3]]), ("b", [5, 6], [rids[2]])]


def test_the_argmax_is_over_the_vocabulary_without_its_padding():
    torch.manual_seed(0)
    weight, rows = torch.randn(40, 8), torch.randn(5000, 8)
    weight[32:] *= 100

    class Shard:
        num_org_elements, org_vocab_start_index = 32, 0

    class Head:
        def __init__(self) -> None:
            self.weight, self.shard_indices = weight, Shard()

    assert torch.equal(eagle3_capture.teacher_argmax(rows, Head()), (rows @ weight[:32].T).argmax(-1))


@pytest.mark.parametrize(("dtype", "finite"), [("float16", False), ("bfloat16", True), ("fp8", True)])
def test_states_that_the_stored_type_cannot_hold_are_told(dtype, finite):
    states = {"aux": torch.full((3, 6), 1e6), "last": torch.randn(2, 2)}
    assert bool(eagle3_capture.stored(states, {"dtype": dtype, "slots": 3})["finite"]) is finite
    states["last"][1, 1] = float("nan")
    assert not eagle3_capture.stored(states, {"dtype": dtype, "slots": 3})["finite"]


def test_rows_that_were_read_take_no_place_in_the_folder(tmp_path):
    path = tmp_path / "1.safetensors"
    parts = [{"id": f"eagle3:ours.{number}:", "start": 0, "rows": 500, "teachers": 0} for number in range(2)]
    tensors = {"aux": torch.arange(1000.0)[:, None], "finite": torch.tensor(True)}
    save_file({**tensors, "teacher_argmax": torch.empty(0)}, path, metadata={"parts": json.dumps(parts)})
    finite, [_, (part, rows)] = capture._read(path)
    assert finite and part == parts[1] and torch.equal(rows["aux"], tensors["aux"][500:])
    assert rows["aux"].untyped_storage().nbytes() == 2000 and path.name not in Path("/proc/self/maps").read_text()


def test_chunks_are_joined_in_the_order_of_their_tokens():
    async def joined() -> Captured:
        wanted = Wanted(5, asyncio.get_running_loop().create_future())
        aux, last = torch.arange(10.0).view(5, 2), torch.arange(3.0).view(3, 1)
        wanted.add(3, {"aux": aux[3:], "last": last[2:], "teacher_argmax": torch.tensor([9])})
        assert not wanted.done.done()
        wanted.add(0, {"aux": aux[:3], "last": last[:2], "teacher_argmax": torch.tensor([7, 8])})
        return await wanted.done

    captured = asyncio.run(joined())
    assert captured.aux_hidden_states.flatten().tolist() == [*range(10)]
    assert captured.last_hidden_state.flatten().tolist() == [0, 1, 2]
    assert captured.teacher_argmax.tolist() == [7, 8, 9]
