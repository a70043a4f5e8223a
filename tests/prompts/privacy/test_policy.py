"""Policies, actions and the verdict of the privacy check, built from its config as precompute.py builds it."""

import logging
import re
from collections.abc import Iterator

import pytest
from privacy_checks import build_privacy, contents, prompt

from eagle3.errors import InputError
from eagle3.prompts.privacy import Privacy, Span
from eagle3.prompts.privacy.policy import BY_A_WORD

EMAIL, CARD, PHONE = "anna.berg@web.de", "4539 5787 6362 1486", "+49 30 901820"


def with_actions(**actions: str) -> Privacy:
    return build_privacy(*(f"privacy.actions.{entity}={action}" for entity, action in actions.items()))


@pytest.fixture(scope="module")
def privacy() -> Privacy:
    return build_privacy()


def test_a_clean_prompt_passes_as_it_came(privacy):
    verdict = privacy(prompt("What is 2 + 2?", "4", "Thanks! Ünïcödé 東京 \U0001f600"))
    assert (verdict.reason, verdict.prompt, verdict.counts) == (None, None, {})


def test_every_message_is_read_whatever_its_role(privacy):
    for position in range(4):
        texts = ["a", "b", "c", "d"]
        texts[position] = f"see {EMAIL}"
        assert privacy(prompt(*texts, roles=("system", "user", "assistant"))).reason == "personal data: EMAIL_ADDRESS"


def test_an_earlier_message_says_what_a_number_is(privacy):
    assert privacy(prompt("Please enter your BSN.", "111222333")).reason == "personal data: NATIONAL_ID"
    assert privacy(prompt("Please enter a number.", "111222333")).reason is None


def test_masks_replace_what_was_found_and_nothing_else():
    before = prompt(f"Mail {EMAIL}, then", f"«{CARD}» é", "end")
    verdict = with_actions(EMAIL_ADDRESS="mask", CREDIT_CARD="mask")(before)
    assert (verdict.reason, verdict.counts) == (None, {"EMAIL_ADDRESS": 1, "CREDIT_CARD": 1})
    assert contents(verdict.prompt) == ["Mail <EMAIL_ADDRESS>, then", "«<CREDIT_CARD>» é", "end"]
    assert contents(before)[0] == f"Mail {EMAIL}, then"


BETWEEN = "\u00a0\u2000\u200d\u202f\u205f\u2060\u3000\ufeff\u2010\u2015\u2212\u00ad"  # blanks and dashes


def test_masks_are_in_the_right_place_where_digits_blanks_and_dashes_are_not_ascii():
    masking = with_actions(CREDIT_CARD="mask")
    for between in BETWEEN:
        wide = CARD.translate({ord(digit): ord(digit) + 0xFEE0 for digit in "0123456789"}).replace(" ", between)
        verdict = masking(prompt(f"İ\U0001f600 {wide} é"))
        assert contents(verdict.prompt) == ["İ\U0001f600 <CREDIT_CARD> é"], ascii(between)


@pytest.mark.parametrize(
    ("action", "text", "reason", "counts"),
    [
        ("keep", f"see {EMAIL}", None, {"EMAIL_ADDRESS": 1}),
        ("mask", f"{EMAIL} {CARD}", "CREDIT_CARD", {"EMAIL_ADDRESS": 1, "CREDIT_CARD": 1}),
        ("keep", f"https://anna:S3cretPw9@shop.web.de/?x={EMAIL}", "URL_PASSWORD",
         {"EMAIL_ADDRESS": 1, "URL_PASSWORD": 1}),
        ("drop", f"Pay with {CARD}. Mail {EMAIL} or x@web.de.", "CREDIT_CARD, EMAIL_ADDRESS",
         {"CREDIT_CARD": 1, "EMAIL_ADDRESS": 2}),
    ],
)  # fmt: skip
def test_one_dropped_entity_drops_the_prompt_whatever_else_is_masked_or_kept(action, text, reason, counts):
    verdict = with_actions(EMAIL_ADDRESS=action)(prompt(text))
    assert verdict.reason == (reason and f"personal data: {reason}")
    assert (verdict.prompt, verdict.counts) == (None, counts)


def test_a_mask_that_would_break_the_definition_of_a_tool_refuses_the_prompt():
    masking = with_actions(CREDIT_CARD="mask")
    parameters = {"const": CARD}
    tools = [{"type": "function", "function": {"name": "pay", "parameters": parameters}}]
    masked = masking(prompt("Pay!")._replace(tools=tools)).prompt
    assert masked.tools[0]["function"]["parameters"] == {"const": "<CREDIT_CARD>"}
    parameters["const"] = int(CARD.replace(" ", ""))
    verdict = masking(prompt("Pay!")._replace(tools=tools))
    assert (verdict.reason, verdict.counts) == ("personal data in tools: CREDIT_CARD", {"CREDIT_CARD": 1})


def test_matched_text_is_neither_logged_nor_in_a_verdict(privacy, caplog, capfd):
    caplog.set_level("DEBUG")
    verdict = privacy(prompt(f"{EMAIL} {CARD} {PHONE} password=Sommer!2024x"))
    output = capfd.readouterr()
    told = f"{verdict.reason} {dict(verdict.counts)} {caplog.text} {output.out} {output.err}"
    assert len(verdict.counts) == 4
    assert not any(part in told for part in (EMAIL, CARD, PHONE, "Sommer", "4111", "anna"))


# Recognisers of your own; findings that overlap


class Own:
    """What a user adds: see the README."""

    def __init__(self, entity: str, pattern: str):
        self.entity, self.pattern = entity, pattern

    def find(self, text: str) -> Iterator[Span]:
        for match in re.finditer(self.pattern, text):
            yield Span(*match.span())


BADGE, AGAIN, DIGIT = Own("BADGE", r"\bB-\d{4}\b"), Own("AGAIN", r"\bB-\d{4}\b"), Own("DIGIT", r"\d")
BADGES = "_target_: tests.prompts.privacy.test_policy.Own, entity: BADGE, pattern: 'B-[0-9]+'"
NUMBER = Own("NUMBER", r"\d{4} \w+")  # begins inside a badge and ends behind it


def with_own(*own: tuple[Own, str]) -> Privacy:
    """Own recognisers alone, each with its action."""
    named = {str(number): recogniser for number, (recogniser, _) in enumerate(own)}
    return Privacy(policy="patterns", recognisers=named, actions={found.entity: action for found, action in own})


def test_a_recogniser_is_one_class_and_its_config():
    badges = build_privacy(f"+privacy.recognisers.badge={{{BADGES}}}", "+privacy.actions.BADGE=mask")
    assert contents(badges(prompt("I am B-1234.")).prompt) == ["I am <BADGE>."]


def test_masks_that_overlap_are_one_named_after_the_longest_and_of_equals_after_the_first():
    verdict = with_own((BADGE, "mask"), (NUMBER, "mask"))(prompt("I am B-1234 Smith, ok"))
    assert contents(verdict.prompt) == ["I am <NUMBER>, ok"]
    verdict = with_own((DIGIT, "mask"), (BADGE, "mask"), (AGAIN, "mask"))(prompt("B-1234 7"))
    assert contents(verdict.prompt) == ["<BADGE> <DIGIT>"]
    assert verdict.counts == {"BADGE": 1, "DIGIT": 1}


@pytest.mark.parametrize("action", ["mask", "keep"])
def test_what_is_to_be_dropped_is_dropped_also_inside_a_longer_finding(action):
    assert with_own((BADGE, action), (DIGIT, "drop"))(prompt("B-1234")).reason == "personal data: DIGIT"


# Findings that are let through


def test_placeholders_pass_and_are_counted_unless_switched_off(privacy):
    strict = build_privacy("privacy.allowed.placeholders=false")
    for text, entity in [
        ("write to jane@example.com", "EMAIL_ADDRESS"),
        ("write to jane.doe@your-company.com", "EMAIL_ADDRESS"),
        ("ping 192.0.2.17 first", "IP_ADDRESS"),
        ("ping 10.1.2.3 first", "IP_ADDRESS"),
        ("the server runs on 127.0.0.1:8080", "IP_ADDRESS"),
        ("listen on fe80::1:2 and 2001:db8::17", "IP_ADDRESS"),
        ("DATABASE_URL=postgres://admin:s3cr3t99@localhost:5432/app", "URL_PASSWORD"),
        ("assert parse('foo@bar.com')", "EMAIL_ADDRESS"),
        ("pay with 4242 4242 4242 4242", "CREDIT_CARD"),
        ("the card 4000 0025 0000 3155 is declined", "CREDIT_CARD"),
        ("the card 6011 0000 0000 0012 is declined", "CREDIT_CARD"),
        ("the card 5555 4444 3333 1111 is declined", "CREDIT_CARD"),
        ("write to user12@gmail.com", "EMAIL_ADDRESS"),
        ("name@company.com is what the field shows", "EMAIL_ADDRESS"),
        ("call (415) 555-0199 or +44 7700 900123", "PHONE_NUMBER"),
        ("the account number 12345678", "BANK_ACCOUNT"),
        ("SSN: 123-45-6789", "NATIONAL_ID"),
        ("SSN 000-00-0000", "NATIONAL_ID"),
    ]:
        passed = privacy(prompt(text))
        assert passed.reason is None and passed.prompt is None and f"{entity} let through" in passed.counts, text
        assert strict(prompt(text)).counts[entity] > 0, text


def test_values_that_may_be_somebodys_do_not(privacy):
    for text, entity in [
        ("write to jane@notexample.com", "EMAIL_ADDRESS"),
        ("write to jane@x.com", "EMAIL_ADDRESS"),
        ("the card 5555 5549 2945 2393 is declined", "CREDIT_CARD"),
        ("the account number 14608295", "BANK_ACCOUNT"),
        ("call (415) 555-2671", "PHONE_NUMBER"),
        ("ping 93.184.216.34 first", "IP_ADDRESS"),
        ("DATABASE_URL=postgres://admin:s3cr3t99@db.acme.com:5432/app", "URL_PASSWORD"),
    ]:
        assert privacy(prompt(text)).counts == {entity: 1}, text


def test_a_teams_own_values_and_domains_pass_and_are_counted():
    text = "write to Help@Acme.com, jane@eu.acme.com or 93.184.216.34; not to jane@notacme.com"
    found = build_privacy("privacy.allowed.values=[93.184.216.34]", "privacy.allowed.domains=[acme.com]")(prompt(text))
    assert found.counts == {"EMAIL_ADDRESS": 1, "EMAIL_ADDRESS let through": 2, "IP_ADDRESS let through": 1}


# Policies


def test_patterns_says_loudly_what_it_cannot_see_and_what_it_sees_in_part(caplog):
    unseen = ["COORDINATES", "LOCATION", "ORGANIZATION", "PERSON", "STREET_ADDRESS"]
    assert build_privacy().blind_spots() == {"unseen": unseen, "partly_seen": [*BY_A_WORD, "PASSWORD in prose"]}
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert (
        f"NOT detected: {', '.join(unseen)}; detected only in part: {', '.join([*BY_A_WORD, 'PASSWORD in prose'])}"
        in record.getMessage()
    )


def test_off_looks_for_nothing_and_says_so(caplog):
    off = build_privacy(policy="off")
    assert off(prompt(f"{EMAIL} {CARD}")).reason is None
    assert off.blind_spots()["unseen"] == ["all"]
    assert "NOT looked for" in caplog.text


@pytest.mark.parametrize(
    ("policy", "overrides", "message"),
    [
        ("strict", (), r"privacy\.model=null.*LOCATION, PERSON.*model\.path=FOLDER.*prompts/privacy=patterns"),
        ("patterns", ("privacy.phone.regions=[UK]",), r"phone\.regions holds UK, no ISO 3166 code.*GB"),
        ("patterns", ("+privacy.actions.BADGE=mask",), r"actions\.BADGE: no recogniser finds it; take API_KEY, "),
        (
            "patterns",
            (f"+privacy.recognisers.badge={{{BADGES}}}",),
            r"actions\.BADGE is not set.*BADGE=drop, mask or keep",
        ),
    ],
)
def test_a_wrong_setting_is_named_with_its_key(policy, overrides, message):
    with pytest.raises(InputError, match=message):
        build_privacy(*overrides, policy=policy)
