"""The checks of an exported head: a sound one passes, every planted fault is found and explained with its remedy."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from exported_head import (
    FINGERPRINT,
    IDS,
    Change,
    Editable,
    added,
    as_specforge,
    as_speculators,
    errors,
    export_head,
    in_another_order,
    name_layers,
    random_head,
    setting,
    with_origin,
)

from eagle3.head_files.files import read_files
from eagle3.head_files.finding import Finding, TargetFacts
from eagle3.serving.check.checks import run_checks
from eagle3.target.facts import target_config


@pytest.fixture
def exported(facts: TargetFacts, tmp_path: Path) -> Editable:
    export_head(random_head(facts, FINGERPRINT), tmp_path / "head", versions={})
    return Editable(tmp_path / "head")


def save_and_check(head: Editable, facts: TargetFacts) -> list[Finding]:
    head.save()
    return run_checks(read_files(head.path), facts)


def levels(findings: list[Finding]) -> dict[str, str]:
    """Of what is not ok."""
    return {finding.check: finding.level for finding in findings if finding.level != "ok"}


# --- sound heads -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"fc_norm": True, "norm_output": True}], ids=["eagle3", "eagle3.1"])
def test_a_sound_export_passes_every_check(options, facts, tmp_path):
    export_head(random_head(facts, FINGERPRINT, **options), tmp_path / "head", versions={})
    findings = run_checks(read_files(tmp_path / "head"), facts)
    assert levels(findings) == {}
    able = "SGLang and vLLM can" if options else "SGLang, vLLM and llama.cpp can"
    assert [finding.message[: len(able)] for finding in findings if finding.check == "servers"] == [able]


def test_what_servers_compute_anyway_and_any_order_of_the_draft_vocabulary_are_no_fault(exported, facts, target):
    in_another_order(exported)
    exported.tensors["embed_tokens.weight"] = target.embedding.to(torch.bfloat16)
    exported.tensors["midlayer.self_attn.rotary_emb.inv_freq"] = torch.ones(32, dtype=torch.bfloat16)
    exported.tensors["d2t"] = exported.tensors["d2t"].int()  # SGLang adds them to int64
    assert levels(save_and_check(exported, facts)) == {}


def test_a_sound_head_of_specforge_has_no_errors(exported, facts):
    as_specforge(exported)
    findings = save_and_check(exported, facts)
    assert levels(findings) == {"layer_ids": "warning", "target": "skipped"}
    [unnamed] = [finding.message for finding in findings if finding.check == "layer_ids"]
    assert "SGLang takes its default, the outputs of [1, 3, 4]" in unnamed


def test_a_sound_head_of_the_speculators_has_only_its_layout_to_change(exported, facts, target):
    as_speculators(exported, target.embedding)
    findings = save_and_check(exported, facts)
    assert errors(findings).keys() == {"layout"} and "layer_ids" not in levels(findings)
    layer = exported.config.pop("transformer_layer_config")
    flat = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "tie_word_embeddings": False}
    exported.config = {key: value for key, value in (layer | exported.config | flat).items() if value is not None}
    findings = save_and_check(exported, facts)
    assert levels(findings) == {"layer_ids": "warning"}
    [unread] = [finding.message for finding in findings if finding.check == "layer_ids"]
    assert "[1, 3, 4]" in unread and "[2, 4, 5]" in unread


@pytest.mark.parametrize(("twice", "expected"), [(True, {}), (False, {"layer_ids": "warning"})])
def test_ids_that_another_trainer_wrote_once_are_named_in_both_readings(twice, expected, exported, facts):
    exported.training = None
    name_layers(exported.config, [1, 3, 4], twice=twice)
    found = {item.check: item for item in save_and_check(exported, facts)}
    assert levels([*found.values()]) == {"target": "skipped"} | expected
    readings = [f"{LAYER_KEY} to {outputs}" for outputs in ([0, 2, 3], [1, 3, 4])]
    assert [reading in found["layer_ids"].message for reading in readings] == [not twice] * 2


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        ({"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, 8192),  # SGLang's Llama computes it otherwise
        ({"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}, 4096),  # the head's own factor lengthens that
        ({"rope_type": "default", "rope_theta": 1e4}, 4096),
    ],
    ids=lambda value: value["rope_type"] if isinstance(value, dict) else "",
)
def test_a_head_covers_the_context_that_sglang_derives_for_its_target(rope, length, facts, target, tmp_path):
    config = type(target.text_config)(**target.text_config.to_dict() | {"rope_parameters": rope})
    scaled = replace(facts, config=target_config(config, 4096, "bfloat16"))
    assert scaled.config.max_position_embeddings == length
    export_head(random_head(scaled, FINGERPRINT), tmp_path / "head", versions={})
    head = Editable(tmp_path / "head")
    assert levels(save_and_check(head, scaled)) == {}
    head.config["max_position_embeddings"] = length // 2
    found = errors(save_and_check(head, scaled))["context"]
    assert f"is less than the target's {8192 if 'factor' in rope else 4096}" in found
    assert f"set it to {length}" in found


@pytest.mark.parametrize(("tokens", "window"), [(300, 300), (20, 64), (4096, None), (None, None)])
def test_a_target_that_reads_longer_texts_than_the_training_had_is_said(tokens, window, facts, tmp_path):
    trained = random_head(facts, FINGERPRINT)
    export_head(with_origin(trained, tokens_of_99_percent=tokens), tmp_path / "head", versions={})
    [found] = [each for each in save_and_check(Editable(tmp_path / "head"), facts) if each.check == "context"]
    assert found.level == "ok" and ("99 %" in found.message) == (window is not None)
    assert window is None or found.message.endswith(f"with and without compare.draft_window={window}")


# --- planted faults --------------------------------------------------------------------------------------------------


def absolute_ids(head: Editable) -> None:
    head.tensors["d2t"] = head.tensors["d2t"] + torch.arange(64)


def offset(position: int, value: int) -> Change:
    return lambda head: head.tensors["d2t"].__setitem__(position, value)


def rename(old: str, new: str) -> Change:
    return lambda head: head.tensors.update({new: head.tensors.pop(old)})


def without(name: str) -> Change:
    return lambda head: head.tensors.pop(name)


def in_float32(head: Editable) -> None:
    head.tensors["fc.weight"] = head.tensors["fc.weight"].float()


def unset(*keys: str) -> Change:
    return lambda head: [head.config.pop(key) for key in keys]


def layer_ids(ids: Any) -> Change:
    """Ids in both places where they can be, as an export has them."""
    return lambda head: name_layers(head.config, ids, twice=isinstance(ids, list))


def recorded_layers(layers: list[int], spoil: Change) -> Change:
    def spoilt(head: Editable) -> None:
        assert head.training is not None
        head.training["origin"]["capture_layers"] = layers
        spoil(head)

    return spoilt


def foreign(*spoils: Change) -> Change:
    """Of another trainer: nothing tells what was trained."""

    def spoil(head: Editable) -> None:
        head.training = None
        for change in spoils:
            change(head)

    return spoil


def at_top_level(ids: list[int]) -> Change:
    def spoil(head: Editable) -> None:
        del head.config["eagle_config"]
        head.config[IDS] = ids

    return foreign(spoil)


def trained_embeddings(head: Editable) -> None:
    head.tensors["embed_tokens.weight"] = torch.ones(4096, 192, dtype=torch.bfloat16)


def of_verifier(name: str) -> Change:
    return foreign(setting(speculators_config={"verifier": {"name_or_path": name}}))


def nested_as(kind: str) -> Change:
    def spoil(head: Editable) -> None:
        as_speculators(head, torch.zeros(4096, 192))
        head.config["speculators_model_type"] = kind

    return spoil


LAYER_KEY, TOP = f"eagle_config.{IDS}", f"{IDS} at the top level"
ROPE = {"rope_type": "default", "rope_theta": 5e5}
AGAIN = "get the trainer's files again, or export again"
# What is planted, the check that finds it, at which level, what it says, and the fix that it names.
FAULTS: list[tuple[Change, str, str, str, str]] = [
    (
        rename("norm.weight", "decoder.norm.weight"), "tensors", "error",
        "decoder.norm.weight is unknown: SGLang silently drops it", "rename it to norm.weight",
    ),
    (added("extra.weight", 2), "tensors", "error", "extra.weight is unknown", "or remove it"),
    (without("lm_head.weight"), "tensors", "error", "lm_head.weight is missing: SGLang would use ran", AGAIN),
    (
        setting(intermediate_size=65), "tensors", "error", "has shape (64, 192), config.json makes it (65, 192)",
        "correct config.json",
    ),
    (
        lambda head: head.tensors["lm_head.weight"][7].fill_(torch.nan), "tensors", "error",
        "lm_head.weight holds 192 non-finite values", AGAIN,
    ),
    (added("fc_norm.0.weight", 192), "tensors", "error", "fc_norm.0.weight is unknown", "set fc_norm=true"),
    (
        added("midlayer.self_attn.q_proj.bias", 192), "tensors", "error", "q_proj.bias is unknown: SGLang silently",
        "train without it",
    ),
    (trained_embeddings, "embedding", "error", "differs from the target's in 40", "train with frozen embeddings"),
    (
        added("embed_tokens.weight", 5000, 192), "embedding", "error", "(5000, 192), the target's (4096, 192)",
        "give the one it was trained on",
    ),
    (absolute_ids, "d2t", "error", "d2t holds target ids", "store d2t - arange(len(d2t))"),
    (offset(1, 9), "d2t", "error", "gives 1 of 64 draft ids a token that another has", AGAIN),
    (offset(63, 4033), "d2t", "error", "to 4096, outside 0 to 4095", AGAIN),
    (without("d2t"), "d2t", "error", "d2t is missing: SGLang takes the 64 draft ids for target ids", AGAIN),
    (lambda head: head.tensors.update(d2t=head.tensors["d2t"].float()), "d2t", "error", "instead of int64", AGAIN),
    (lambda head: head.tensors["t2d"].__setitem__(10, False), "t2d", "error", "does not mark the 64 tokens", AGAIN),
    (lambda head: head.tensors.update(t2d=head.tensors["t2d"].int()), "t2d", "error", "instead of bool (4096,)", AGAIN),
    (setting(draft_vocab_size=None), "draft_vocab_size", "error", "with the target's lm_head", "set it to 64"),
    (
        layer_ids([2, 4, 5]), "layer_ids", "error", "[1, 3, 4] (those are the inputs of layers",
        f"set {LAYER_KEY} to [1, 3, 4] and {TOP} to [2, 4, 5]",
    ),
    (layer_ids([1, 3, 5]), "layer_ids", "error", "[1, 3, 5] are not those of the training", "to [1, 3, 4]"),
    (recorded_layers([2, 4, 6], layer_ids(None)), "layer_ids", "error", "missing, and the layer ids", "[1, 3, 5]"),
    (layer_ids([4, 3, 1]), "layer_ids", "error", "[4, 3, 1] do not ascend", f"set {LAYER_KEY} to [1, 3, 4]"),
    (layer_ids([1, 3, 7]), "layer_ids", "error", "different ones from 0 to 6 of the target's 8 layers", "those of the"),
    (layer_ids(None), "layer_ids", "warning", "names no layers: SGLang takes its default", f"{TOP} to [2, 4, 5]"),
    (
        at_top_level([2, 4, 5]), "layer_ids", "warning", "at the top level, which SGLang does not read",
        f"or {LAYER_KEY} to [2, 4, 5] and {TOP} to [3, 5, 6] if",
    ),
    (at_top_level([1, 4, 6]), "layer_ids", "error", "takes its default, the outputs of [1, 3, 4]", "to [0, 3, 5]"),
    (
        unset("rope_theta", "rope_scaling", "rope_parameters"), "rope", "error", "rope_theta is missing: SGLang assum",
        "set rope_parameters to {'rope_type': 'default', 'rope_theta': 10000.0}",
    ),
    (foreign(setting(rope_parameters=ROPE, rope_theta=5e5)), "rope", "warning", "is not the target's", "set it"),
    (setting(rope_theta=5e5), "rope", "error", "rope_theta and rope_scaling say", "make them agree"),
    (setting(rope_parameters=ROPE | {"rope_type": "spiral"}), "model", "error", "rope_type=spiral", "correct it"),
    (setting(max_position_embeddings=2048), "context", "error", "is less than the target's 4096", "set it to 4096"),
    (setting(dtype="float16"), "dtype", "warning", "dtype=float16, the target's is bfloat16", "launch.dtype=bfloat16"),
    (foreign(setting(dtype="float32")), "dtype", "error", "SGLang runs the head in float16", "set it to bfloat16, or"),
    (in_float32, "dtype", "warning", "tensors are bfloat16, float32: SGLang rounds them", "store them so"),
    (setting(hidden_size=256), "model", "error", "hidden_size=256, this target has 192: it is a head of", "give"),
    (setting(intermediate_size=None), "model", "error", "config.json has a size that is null", "state it"),
    (setting(num_attention_heads=5), "model", "error", "num_heads=5 does not divide", "pick a divisor"),
    (unset("rms_norm_eps"), "model", "error", "config.json lacks 'rms_norm_eps'", "add it"),
    (setting(architectures=["LlamaForCausalLM"]), "model", "error", "build another", "['LlamaForCausalLMEagle3']"),
    (setting(model_type="qwen3"), "model", "error", "model_type=qwen3", "set it to llama"),
    (setting(tie_word_embeddings=True), "model", "error", "SGLang drafts with the target's", "set it false"),
    (setting(hidden_act="gelu"), "model", "error", "hidden_act=gelu: SGLang supports only silu", "set it"),
    (setting(num_hidden_layers=2), "model", "error", "num_hidden_layers of config.json", "choose another head"),
    (setting(norm_before_fc=True), "options", "warning", "from 0.5.17 on, older versions drop", "with vLLM"),
    (setting(norm_before_fc=True, fc_norm=True), "model", "error", "norm_before_fc with fc_norm", "choose another"),
    (setting(target_hidden_size=None), "options", "error", "null: SGLang multiplies by it", "remove the key"),
    (setting(norm_before_residual=True), "residual", "error", "SGLang does not read it", "or serve it with vLLM"),
    # What P-EAGLE's trainers write: Automodel, Model-Optimizer, SpecForge, the speculators; and others of the latter.
    (setting(parallel_drafting=True), "model", "error", "parallel_drafting of config.json", "choose another head"),
    (
        setting(eagle_config={IDS: [1, 3, 4], "parallel_draft_step": 4}), "model", "error",
        "eagle_config.parallel_draft_step of config.json", "choose another head",
    ),
    (setting(architectures=["PEagleDraftModel"]), "model", "error", "architectures of config.json", "choose another"),
    *(
        (
            foreign(nested_as(kind)), "model", "error",
            "speculators_model_type of config.json: this project reads heads of one Llama layer", "choose another head",
        )
        for kind in ("peagle", "dflash", "mtp", "eagle")
    ),
    (
        foreign(setting(norm_output=True)), "norm_output", "warning",
        "the next draft gets the normed state, but a head of SpecForge from before", "remove the key",
    ),
    (
        foreign(setting(norm_output=False)), "norm_output", "warning",
        "lm_head gets the normed state, but a head of SpecForge from before", "choose another head",
    ),
    (
        foreign(unset("rope_theta"), setting(rope_parameters=ROPE | {"partial_rotary_factor": 0.5})),
        "options", "error", "partial_rotary_factor=0.5: SGLang rotates", "remove the key",
    ),
    (setting(partial_rotary_factor=0.5), "options", "error", "partial_rotary_factor=0.5: SGLang rotates", "remove the"),
    (
        setting(sliding_window=2048, layer_types=["sliding_attention"]), "options", "warning",
        "trained to attend to the last 2048 tokens, SGLang attends to all", "draft_window=2048",
    ),
    (setting(mlp_bias=True), "options", "error", "mlp_bias=true: of biases SGLang keeps o_proj's", "train without"),
    (
        lambda head: head.training["origin"]["target"].update(weights_hash="other"), "target", "error",
        "weights: the head was trained on tiny", "use that",
    ),
    (of_verifier("their/other-model"), "target", "warning", "trained on their/other-model", "give that"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("spoil", "check", "level", "problem", "fix"), FAULTS, ids=[f"{fault[1]}: {fault[3]}" for fault in FAULTS]
)
def test_a_planted_fault_is_found_and_explained(spoil, check, level, problem, fix, exported, facts):
    spoil(exported)
    found = [(item.check, item.level, item.message) for item in save_and_check(exported, facts)]
    assert [text for *which, text in found if which == [check, level] and problem in text and fix in text], found


def test_a_fault_that_several_checks_stumble_over_is_said_once(exported, facts):
    setting(num_hidden_layers=2)(exported)
    found = levels(save_and_check(exported, facts))
    assert found == {"model": "error", "tensors": "skipped", "d2t": "skipped", "t2d": "skipped"}


def test_a_head_of_another_target_is_found_whatever_its_sizes(exported, facts):
    other = replace(facts, config=replace(facts.config, vocab_size=150, num_layers=4), embedding=None)
    found = errors(save_and_check(exported, other))
    assert "vocab_size=4096, this target has 150: it is a head of another target" in found["model"]
    assert "give the target that the head was trained on" in found["layer_ids"]


def test_for_deepseek_targets_sglang_adds_one_only_to_ids_that_start_with_1(exported, facts):
    deepseek = replace(facts, config=replace(facts.config, model_type="deepseek_v3"))
    assert levels(save_and_check(exported, deepseek)) == {}
    layer_ids([2, 3, 4])(exported)
    exported.training = None
    [finding] = [item for item in save_and_check(exported, deepseek) if item.check == "layer_ids"]
    remedy = f"for SGLang alone set {LAYER_KEY} to [3, 4, 5] and remove {IDS} from the top level"
    assert (finding.level, remedy in finding.message) == ("warning", True)


def test_a_head_of_a_kind_of_your_own_is_not_advised_to_be_another_one(exported, facts):
    exported.training = None
    exported.config["head_kind"] = "two_layer_head.TwoLayers"
    found = {item.check: item for item in save_and_check(exported, facts)}
    assert found["servers"].level == "warning"
    assert found["servers"].message == "no server can serve heads of kind two_layer_head.TwoLayers"
    assert found["rope"].level == "skipped"
    assert {name for name, item in found.items() if item.level == "error"} == {"tensors"}  # of a second layer


def test_offsets_of_tokens_without_neighbours_are_offsets(exported, facts):
    ids = torch.arange(10, 10 + 3 * 64, 3)
    exported.tensors |= {"d2t": ids - torch.arange(64), "t2d": torch.zeros(4096, dtype=torch.bool)}
    exported.tensors["t2d"][ids] = True
    assert levels(save_and_check(exported, facts)) == {}


def test_another_chat_template_is_a_warning(exported, facts):
    served = replace(facts, identity=FINGERPRINT.with_template("other"))
    [finding] = [item for item in save_and_check(exported, served) if item.level != "ok"]
    assert (finding.check, finding.level) == ("target", "warning")
    assert "chat.template" in finding.message
