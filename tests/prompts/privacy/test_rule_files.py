"""Rules that others keep, in the format of gitleaks: read as they mean it, and refused when they are broken."""

import pickle
from pathlib import Path

import pytest

from eagle3.errors import InputError
from eagle3.prompts.privacy.rule_files import RuleFile

RULES = r"""
title = "rules"
[[rules]]
id = "acme"
regex = '''\b((?:acme)_(?i)[a-z0-9]{8,12}(?-i:X)?)(?:['"\s]|\z)'''
keywords = ["ACME_"]
entropy = 2
[[rules]]
id = "group"
regex = '''(?i)(?:zeta)(?:[a-z]{0,9})\s?=\s?([[:alnum:]()]{10})'''
secretGroup = 1
[[rules]]
id = "a path"
path = "secrets.txt"
"""


@pytest.fixture
def rules(tmp_path: Path) -> RuleFile:
    (tmp_path / "rules.toml").write_text(RULES)
    return RuleFile(path=str(tmp_path / "rules.toml"), action="drop")


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("key acme_q7R2k9Zp now", "acme_q7R2k9Zp"),
        ("key acme_q7R2k9Zp", "acme_q7R2k9Zp"),
        ("ZETAkey = q7R2k9ZpA1", "q7R2k9ZpA1"),
        ("key ACME_q7R2k9Zp", None),  # the flag begins behind the prefix
        ("key acme_aaaaaaaa", None),  # too little entropy
        ("key acme_yourkey1", None),  # a placeholder
    ],
)
def test_a_secret_is_the_group_that_the_rule_says(rules: RuleFile, text: str, secret: str | None) -> None:
    assert [text[span.start : span.end] for span in rules.find(text)] == ([secret] if secret else [])


def test_rules_travel_to_a_worker_process(rules: RuleFile) -> None:
    assert list(pickle.loads(pickle.dumps(rules)).find("acme_q7R2k9Zp"))
    assert rules.files() == [rules.path]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read; name a rule file"),
        ("[[rules", r"holds no \[\[rules\]\]"),
        ("title = 'x'", r"holds no \[\[rules\]\]"),
        ("[[rules]]\nid = 'a'\nregex = '('", "Python cannot read the expression of rule a"),
    ],
)
def test_a_broken_file_is_one_line_with_the_key(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "rules.toml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match=rf"prompts\.privacy\.recognisers\.rules\.path=.*{message}"):
        RuleFile(path=str(path), action="drop")
