"""Policies, actions and the verdict of the privacy check, built from its config as precompute.py builds it."""

import logging
import re
from collections.abc import Iterator

import pytest
from hydra import compose, initialize_config_dir
from stores import CONF

from eagle3 import cli
from eagle3.errors import InputError
from eagle3.prompts import Prompt
from eagle3.prompts.privacy import Privacy, Span

PROMPTS_CONF = str(CONF / "prompts")
EMAIL, CARD, PHONE = "anna.berg@web.de", "4539 5787 6362 1486", "+49 30 901820"


def build_privacy(*overrides: str, policy: str = "patterns") -> Privacy:
    with initialize_config_dir(PROMPTS_CONF, version_base="1.3"):
        config = compose(overrides=[f"+privacy={policy}", *overrides])
    return cli.build(config.privacy)


@pytest.fixture(scope="module")
def privacy() -> Privacy:
    return build_privacy()


def prompt(*contents: str, roles: tuple[str, ...] = ("user", "assistant")) -> Prompt:
    messages = [{"role": roles[index % len(roles)], "content": content} for index, content in enumerate(contents)]
    return Prompt(id="1", source="s", license="MIT", messages=messages)


def contents(changed: Prompt | None) -> list[str]:
    assert changed is not None
    return [message["content"] for message in changed.messages]


def test_a_clean_prompt_passes_as_it_came(privacy):
    verdict = privacy(prompt("What is 2 + 2?", "4", "Thanks! Ünïcödé 東京 \U0001f600"))
    assert (verdict.reason, verdict.prompt, verdict.counts) == (None, None, {})


def test_the_reason_and_the_counts_name_entities_in_order_and_never_text(privacy):
    verdict = privacy(prompt(f"Pay with {CARD}. Mail {EMAIL} or x@web.de."))
    assert verdict.reason == "personal data: CREDIT_CARD, EMAIL_ADDRESS"
    assert verdict.counts == {"CREDIT_CARD": 1, "EMAIL_ADDRESS": 2}


@pytest.mark.parametrize("position", [0, 1, 2, 3])
def test_every_message_is_read_whatever_its_role(privacy, position):
    texts = ["a", "b", "c", "d"]
    texts[position] = f"see {EMAIL}"
    assert privacy(prompt(*texts, roles=("system", "user", "assistant"))).reason == "personal data: EMAIL_ADDRESS"


def test_an_earlier_message_says_what_a_number_is(privacy):
    assert privacy(prompt("Please enter your BSN.", "111222333")).reason == "personal data: NL_BSN"
    assert privacy(prompt("Please enter a number.", "111222333")).reason is None


def test_masks_replace_what_was_found_and_nothing_else():
    masking = build_privacy("privacy.actions.EMAIL_ADDRESS=mask", "privacy.actions.CREDIT_CARD=mask")
    before = prompt(f"Mail {EMAIL}, then", f"«{CARD}» é", "end")
    verdict = masking(before)
    assert verdict.reason is None
    assert contents(verdict.prompt) == ["Mail <EMAIL_ADDRESS>, then", "«<CREDIT_CARD>» é", "end"]
    assert contents(before)[0] == f"Mail {EMAIL}, then"
    assert verdict.counts == {"EMAIL_ADDRESS": 1, "CREDIT_CARD": 1}


def test_masks_are_in_the_right_place_where_digits_and_blanks_are_not_ascii():
    masking = build_privacy("privacy.actions.CREDIT_CARD=mask")
    wide = CARD.translate({ord(digit): ord(digit) + 0xFEE0 for digit in "0123456789"}).replace(" ", "\u202f")
    assert contents(masking(prompt(f"İ\U0001f600 {wide} é")).prompt) == ["İ\U0001f600 <CREDIT_CARD> é"]


def test_what_is_kept_is_counted_and_passes():
    verdict = build_privacy("privacy.actions.EMAIL_ADDRESS=keep")(prompt(f"see {EMAIL}"))
    assert (verdict.reason, verdict.prompt, verdict.counts) == (None, None, {"EMAIL_ADDRESS": 1})


def test_one_dropped_entity_drops_the_prompt_whatever_else_is_masked():
    verdict = build_privacy("privacy.actions.EMAIL_ADDRESS=mask")(prompt(f"{EMAIL} {CARD}"))
    assert (verdict.reason, verdict.prompt) == ("personal data: CREDIT_CARD", None)


def test_a_kept_finding_does_not_hide_another_on_the_same_place():
    url = "https://anna:S3cretPw9@shop.web.de/?x=" + EMAIL
    keeping = build_privacy("privacy.actions.EMAIL_ADDRESS=keep")
    assert keeping(prompt(url)).reason == "personal data: URL_PASSWORD"


class Badge:
    """What a user adds: see the README."""

    entity = "BADGE"

    def find(self, text: str) -> Iterator[Span]:
        for match in re.finditer(r"\bB-\d{4}\b", text):
            yield Span(*match.span())


class EveryDigit:
    entity = "DIGIT"

    def find(self, text: str) -> Iterator[Span]:
        return (Span(index, index + 1) for index, char in enumerate(text) if char.isdigit())


class Again(Badge):
    entity = "AGAIN"


class NumberAndMore:
    """Begins inside a badge and ends behind it."""

    entity = "NUMBER"

    def find(self, text: str) -> Iterator[Span]:
        for match in re.finditer(r"\d{4} \w+", text):
            yield Span(*match.span())


def with_own(**actions: tuple[type, str]) -> Privacy:
    """Own recognisers alone, each with its action."""
    own = {name: recogniser() for name, (recogniser, _) in actions.items()}
    return Privacy(policy="patterns", recognisers=own, actions={r.entity: actions[name][1] for name, r in own.items()})


def test_masks_that_overlap_are_one_over_all_of_their_places():
    verdict = with_own(badge=(Badge, "mask"), number=(NumberAndMore, "mask"))(prompt("I am B-1234 Smith, ok"))
    assert contents(verdict.prompt) == ["I am <NUMBER>, ok"]


@pytest.mark.parametrize("action", ["mask", "keep"])
def test_what_is_to_be_dropped_is_dropped_also_inside_a_longer_finding(action):
    verdict = with_own(badge=(Badge, action), digit=(EveryDigit, "drop"))(prompt("B-1234"))
    assert verdict.reason == "personal data: DIGIT"


def test_a_recogniser_is_one_class_and_one_line_of_config():
    line = "+privacy.recognisers.badge={_target_: tests.prompts.privacy.test_policy.Badge}"
    assert contents(build_privacy(line, "+privacy.actions.BADGE=mask")(prompt("I am B-1234.")).prompt) == [
        "I am <BADGE>."
    ]


def test_of_findings_that_overlap_the_longest_counts_and_of_equals_the_first():
    own = with_own(digit=(EveryDigit, "mask"), badge=(Badge, "mask"), again=(Again, "mask"))
    verdict = own(prompt("B-1234 7"))
    assert contents(verdict.prompt) == ["<BADGE> <DIGIT>"]
    assert verdict.counts == {"BADGE": 1, "DIGIT": 1}


# Policies


def test_strict_refuses_to_run_without_a_model_and_names_both_ways_out():
    message = r"prompts\.privacy\.model=null.*LOCATION, PERSON.*model\.path=FOLDER.*prompts/privacy=patterns"
    with pytest.raises(InputError, match=message):
        build_privacy(policy="strict")


def test_patterns_says_loudly_what_it_cannot_see_and_what_it_sees_in_part(caplog):
    patterns = build_privacy()
    assert patterns.unseen() == ["LOCATION", "ORGANIZATION", "PERSON", "STREET_ADDRESS"]
    assert patterns.partly_seen() == ["PASSWORD in prose"]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "NOT seen and let through: LOCATION, ORGANIZATION, PERSON, STREET_ADDRESS" in record.getMessage()
    assert "seen only in part: PASSWORD in prose" in record.getMessage()


def test_off_looks_for_nothing_and_says_so(caplog):
    off = build_privacy(policy="off")
    assert off(prompt(f"{EMAIL} {CARD}")).reason is None
    assert off.unseen() == ["all"]
    assert "NOT looked for" in caplog.text


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("privacy.phone.regions=[UK]", r"phone\.regions holds UK, no ISO 3166 code.*GB"),
        (
            "+privacy.actions.BADGE=mask",
            r"actions\.BADGE: no recogniser finds it; take API_KEY, ",
        ),
    ],
)
def test_a_wrong_setting_is_named_with_its_key(override, message):
    with pytest.raises(InputError, match=message):
        build_privacy(override)


def test_matched_text_is_neither_logged_nor_in_a_verdict(privacy, caplog, capfd):
    caplog.set_level("DEBUG")
    verdict = privacy(prompt(f"{EMAIL} {CARD} {PHONE} password=Sommer!2024x"))
    output = capfd.readouterr()
    told = f"{verdict.reason} {dict(verdict.counts)} {caplog.text} {output.out} {output.err}"
    assert len(verdict.counts) == 4
    assert not any(part in told for part in (EMAIL, CARD, PHONE, "Sommer", "4111", "anna"))


def test_a_mask_that_would_break_the_definition_of_a_tool_refuses_the_prompt():
    masking = build_privacy("privacy.actions.CREDIT_CARD=mask")
    tools = [{"type": "function", "function": {"name": "pay", "parameters": {"const": CARD}}}]
    assert masking(prompt("Pay!")._replace(tools=tools)).prompt.tools[0]["function"]["parameters"] == {
        "const": "<CREDIT_CARD>"
    }
    tools[0]["function"]["parameters"]["const"] = int(CARD.replace(" ", ""))
    verdict = masking(prompt("Pay!")._replace(tools=tools))
    assert (verdict.reason, verdict.counts) == ("personal data in tools: CREDIT_CARD", {"CREDIT_CARD": 1})
