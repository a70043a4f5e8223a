"""Which rows may be used, which sources are refused by name, and whom a release credits."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf
from prompt_stage import chat, write
from stores import CONF

from eagle3.errors import InputError
from eagle3.prompts.licenses.rules import LicenseCheck, LicenseRules
from eagle3.prompts.licenses.terms import join_licenses, names_in, source_terms
from eagle3.prompts.reading.prompt import Prompt
from eagle3.settings.prompts import LicenseSettings
from eagle3.settings.types import validated

DEFAULTS = OmegaConf.to_container(OmegaConf.load(CONF / "prompts/licenses/default.yaml"))


def rules(**config) -> LicenseRules:
    return LicenseRules(validated(LicenseSettings, {**DEFAULTS, **config}))


def terms(path: str = "/data/chats.jsonl", *, name: str = "chats", license: str | None = None, attribution=None):
    return source_terms(name=name, path=path, license=license, attribution=attribution)


def verdict(license: str | None, *, source: str = "chats", of=None, **config) -> str | None:
    row = Prompt(id="1", source=source, license=license, messages=[{"role": "user", "content": "hello"}])
    return LicenseCheck(rules(**config), of or terms())(row).reason


def card(folder: Path, front_matter: str, body: str = "") -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text(f"---\n{front_matter}\n---\n{body}", encoding="utf-8")
    return str(folder)


# Licences


def test_a_licence_that_is_allowed_passes_under_its_usual_names():
    licenses = (
        "mit", "MIT AND CC-BY-4.0", "MIT OR GPL-3.0-only", "(GPL-3.0-only AND MIT) OR ISC", "Public  Domain",
        "MIT AND public-domain", "MIT AND pddl", "odc-by", "The MIT  License (MIT)", "Apache License, Version 2.0",
        "CC BY 4.0", "Creative Commons Attribution 4.0 International", "CC0", "https://opensource.org/licenses/MIT",
        "https://creativecommons.org/licenses/by/4.0/", "3-Clause BSD License",
        "Apache License 2.0 AND mit license",
    )  # fmt: skip
    assert {license: reason for license in licenses if (reason := verdict(license))} == {}


@pytest.mark.parametrize(
    ("reason", "licenses"),
    {
        "license missing": (None, " \n"),
        "license unknown": (
            "CC BY-NC 4.0", "mit license AND CC BY-NC 4.0", "CC BY", "BSD", "other", "Jane-Doe-1971", "лицензия",
            "MIT AND Jane-Doe-1971",
        ),
        "license unparsable": (
            "https://creativecommons.org/licenses/by-nc/4.0/", "Apache License 2.0 (CC BY 4.0)", "()",
            "(OR MIT WITH x)", "(" * 5000, "MIT AND (GPL-3.0-only OR " * 5000 + "MIT" + ")" * 5000,
        ),
        "license not allowed: CC-BY-NC-4.0": ("cc-by-nc-4.0",),
        "license not allowed: MIT AND GPL-3.0-only": ("MIT AND GPL-3.0-only",),
        "license not allowed: CC-BY-SA-4.0": ("CC-BY-SA-4.0",),
        "license not allowed: MIT WITH Classpath-exception-2.0": ("MIT WITH Classpath-exception-2.0",),
        "license not allowed: public-domain AND GPL-3.0-only": ("public-domain AND GPL-3.0-only",),
    }.items(),
)  # fmt: skip
def test_the_refusal_of_a_licence_names_what_spdx_knows_and_never_quotes_the_row(reason, licenses):
    assert {verdict(license) for license in licenses} == {reason}


def test_named_terms_pass_whole_and_inside_expressions():
    allowed = {
        "allowed_terms": ["Acme data terms 2026", "acme-terms", "Terms and conditions (Acme)", "Bits or Bytes v1!"]
    }
    listed = join_licenses(["MIT", "Bits or Bytes v1!"])
    for named in ("terms and conditions (acme)", "ACME  data terms 2026", "MIT AND acme-terms", listed):
        assert verdict(named, **allowed) is None
    assert verdict("Other data terms", **allowed) == "license unknown"


@pytest.mark.parametrize("entry", ["Apache2", "MIT AND ISC", "()"])
def test_a_bad_allow_list_names_the_key(entry):
    with pytest.raises(InputError, match=r"prompts\.licenses\.allowed holds .*, which is not an SPDX id"):
        rules(allowed=[entry])


# Sources refused by name


def test_a_source_whose_terms_forbid_it_is_refused_with_the_reason_whatever_its_licence():
    for name in (
        "Open Orca", "Share\uff27PT", "GPT 3.5", "ultra.chat", "ShareGPT_V3_unfiltered", "my ShareGPT copy",
        "lmsys/lmsys-chat-1m", "WildChat-1M", "made-by-gpt_4o",
    ):  # fmt: skip
        reason = verdict("MIT", of=terms(name=name))
        assert reason.startswith("source forbidden: ") and "terms forbid" in reason
        assert verdict("MIT", source=name) == reason


def test_the_folder_and_the_hub_id_give_a_source_away():
    for path in (
        "/data/sharegpt/train.jsonl", "/data/ShareGPT.jsonl", "/data/sharegpt/a/b/c/train.jsonl",
        "s3://bucket/wild_chat/2024/train.jsonl.gz", "hf://datasets/lmsys/lmsys-chat-1m/data/train.parquet",
        "/home/me/.cache/hub/datasets--lmsys--lmsys-chat-1m/snapshots/0123/data",
        "https://huggingface.co/datasets/allenai/WildChat/resolve/main/train.parquet",
    ):  # fmt: skip
        assert rules().source_refusal(*names_in(path))[0].startswith("source forbidden: "), path


def test_the_title_of_a_card_and_what_it_was_made_of_give_a_source_away(tmp_path):
    for line in ("pretty_name: ShareGPT 90k", "source_datasets: [extended|ShareGPT]"):
        found = terms(card(tmp_path, f"license: mit\n{line}"))
        assert verdict("MIT", of=found).startswith("source forbidden: ShareGPT")


def test_other_names_pass_and_whose_home_the_data_are_in_says_nothing_of_them():
    names = ["chats", "oasst2", "gpt-oss-120b-answers", "shared", "dolly"]
    assert {verdict("MIT", of=terms(name=name), source=name) for name in names} == {None}
    assert rules().source_refusal(*names_in("/home/claude/data/chats.jsonl")) is None


def test_a_cleared_name_passes_and_only_that_one_and_still_needs_its_licence():
    cleared = {"cleared": ["LMSYS Chat 1M"]}
    assert verdict("MIT", of=terms(name="lmsys-chat-1m"), **cleared) is None
    assert verdict("MIT", source="lmsys_chat_1m", **cleared) is None
    assert verdict("MIT", of=terms(name="lmsys-chat-1m-clean"), **cleared).startswith("source forbidden: LMSYS")
    assert verdict("MIT", of=terms(name="lmsys-chat-1m"), source="sharegpt", **cleared).startswith("source forbidden")
    assert verdict(None, of=terms(name="lmsys-chat-1m"), **cleared) == "license missing"


# Dataset cards


@pytest.mark.parametrize(
    ("front_matter", "license"),
    [
        ("license: [mit, cc-by-4.0]", "mit AND cc-by-4.0"),
        ("license:\n- odc-by", "odc-by"),
        ("license: [mit OR gpl-3.0, gpl-2.0-or-later]", "(mit OR gpl-3.0) AND gpl-2.0-or-later"),
        ("license: other\nlicense_name: acme-terms\nlicense_link: LICENSE", "acme-terms"),
        ("license: other", "other"),
        *((empty, None) for empty in ("license: [[mit]]", "license: 2", "license: null", "- a list", "")),
    ],
)
def test_a_card_gives_the_licence_of_rows_that_name_none(tmp_path, front_matter, license):
    found = terms(card(tmp_path, front_matter))
    assert (found.license, found.license_from) == (license, "card" if license else None)


def test_the_card_of_a_folder_above_counts_and_the_nearest_first(tmp_path):
    card(tmp_path, "license: mit\npretty_name: Above")
    (tmp_path / "data" / "en").mkdir(parents=True)
    assert terms(str(tmp_path / "data" / "en" / "chats.jsonl")).license == "mit"
    card(tmp_path / "data", "license: cc-by-nc-4.0")
    assert terms(str(tmp_path / "data" / "en" / "chats.jsonl")).license == "cc-by-nc-4.0"


def test_a_setting_that_overrules_a_card_or_a_name_says_so(tmp_path, caplog):
    folder = card(tmp_path, "license: cc-by-nc-4.0")
    found = terms(folder, license="MIT")
    assert (found.license, found.license_from) == ("MIT", "config")
    assert verdict("MIT", of=found) is None
    assert "OVERRULES its dataset card, which says cc-by-nc-4.0 (license not allowed: CC-BY-NC-4.0)" in caplog.text
    caplog.clear()
    verdict("MIT", of=terms(name="ShareGPT"), cleared=["share-gpt"])
    assert "cleared lets source ShareGPT pass" in caplog.text
    caplog.clear()
    verdict("MIT", of=terms(card(tmp_path, "license: mit"), license="Apache-2.0"))
    assert not caplog.text


def test_an_alias_becomes_its_id_and_a_refused_licence_is_named_as_it_stands():
    check = LicenseCheck(rules(), terms())
    row = {"id": "1", "source": "chats", "messages": []}
    assert check(Prompt(license="Apache License 2.0", **row)).prompt.license == "Apache-2.0"
    assert check(Prompt(license="mit", **row)).prompt is None
    assert check(Prompt(license="My  terms", **row)).name == "My  terms"


@pytest.mark.parametrize(
    ("path", "row", "name"),
    [
        ("alpaca-cluster/exports/chats.jsonl", {}, "alpaca-cluster"),
        ("mix.jsonl", {"source": "ours", "model": "gpt-4o"}, "gpt-4o"),
    ],
)
def test_a_refused_source_is_named_as_cleared_needs_it(prepare, tmp_path, path, row, name):
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    write(tmp_path / path, [chat("a", **row), chat("b", **row)])
    with pytest.raises(InputError, match=rf"\({name}: 2\)\); .*'prompts\.licenses\.cleared=\[\"{name}\"\]'"):
        prepare(path=str(tmp_path / path))
    ledger = prepare(path=str(tmp_path / path), licenses={"cleared": [name]})
    assert ledger["prompts"] == 2


def test_refused_sources_and_licences_are_counted_by_name_where_people_look(prepare, caplog):
    caplog.set_level("INFO")
    sources = [*["meta-math/MetaMathQA"] * 2, "microsoft/orca-math-word-problems-200k", "ours"]
    prepare([*(chat(f"q {index}", source=source) for index, source in enumerate(sources)), chat("x", license="Ours 2")])
    assert "(meta-math/MetaMathQA: 2, microsoft/" in caplog.text and "license unknown: 1 (Ours 2: 1)" in caplog.text
    report = (prepare.folder / "report.md").read_text()
    assert "| meta-math/MetaMathQA | 2 |" in report and "| license unknown | Ours 2 | 1 |" in report
    assert [reject["name"] for reject in prepare.rejects()] == [*sources[:3], "Ours 2"]


@pytest.mark.parametrize("text", ["", "no front matter", "---\nlicense: mit", "---\nlicense: [mit\n---\n", "\xff\n---"])
def test_a_folder_whose_card_cannot_be_read_has_no_licence(tmp_path, text):
    (tmp_path / "README.md").write_bytes(text.encode("latin-1"))
    (tmp_path / "other" / "README.md").mkdir(parents=True)
    for path in (tmp_path, tmp_path / "other", tmp_path / "nothing"):
        found = terms(str(path))
        assert (found.license, found.citation, found.link) == (None, None, None)


# Credits


def test_credit_comes_from_the_card_and_is_one_paragraph_a_source(prepare, tmp_path):
    body = "# Quack\n\n## Citation Information\n\n```\n@misc{quack, title={Ducks}}\n```\n\n## Contact\nnobody\n"
    path = card(tmp_path / "datasets--zoo--quack" / "snapshots" / "0123", "license: cc-by-4.0", body)
    named = [{"prompt": "b"}, {"prompt": "c", "license": "public-domain", "source": "pond"}]
    write(Path(path) / "train.jsonl", [{"prompt": "a", "license": "CC-BY-4.0"}, *named])
    other = write(tmp_path / "none.jsonl", [{"prompt": "a"}])  # a source that gave no prompt is not credited
    ledger = prepare(sources=[{"path": path, "name": "quack", "license": "CC-BY-4.0"}, str(other)])
    text = (prepare.folder / "attribution.txt").read_text()
    [entry, _] = ledger["attribution"]
    assert entry["link"] == "https://huggingface.co/datasets/zoo/quack" and not entry["missing"]
    assert "quack\n  licence: CC-BY-4.0 (2 prompts), public-domain (1 prompts)\n  from: pond\n" in text
    assert "@misc{quack, title={Ducks}}" in text and "nobody" not in text and "none" not in text
    assert text.endswith("Licence texts:\n  CC-BY-4.0: https://spdx.org/licenses/CC-BY-4.0.html\n")


def test_credit_that_a_licence_asks_for_and_nobody_gave_is_called_missing(prepare, tmp_path):
    cases = {
        "by": (["CC-BY-4.0"], None, True),
        "named": (["CC-BY-4.0"], "© the ducks", False),
        "free": (["CC0-1.0", "Public-Domain"], None, False),
        "both": (["CC0-1.0", "MIT"], None, True),
        "own": (["in-house"], None, False),
        "acme": (["acme-internal"], None, True),
    }
    sources = []
    for name, (licenses, attribution, _) in cases.items():
        path = write(tmp_path / f"{name}.jsonl", [chat(f"{name} {each}", license=each) for each in licenses])
        sources.append({"path": str(path)} | ({"attribution": attribution} if attribution else {}))
    ledger = prepare(sources=sources, licenses={"allowed_terms": ["in-house", "acme-internal"]})
    text = (prepare.folder / "attribution.txt").read_text()
    assert {each["source"]: each["missing"] for each in ledger["attribution"]} == {
        name: missing for name, (*_, missing) in cases.items()
    }
    assert text.count("CREDIT MISSING") == 3 and "© the ducks" in text
    assert text.count("https://spdx.org/licenses/") == 3  # only of what SPDX knows
