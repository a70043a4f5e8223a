"""Placeholders pass by default, counted; a switch keeps them out, and a team lets its own through."""

import pytest

from tests.prompts.privacy.test_policy import build_privacy, prompt


def verdict(text: str, *overrides: str):
    return build_privacy(*(f"privacy.allowed.{override}" for override in overrides))(prompt(text))


PLACEHOLDERS = [
    ("write to jane@example.com", "EMAIL_ADDRESS"),
    ("write to jane.doe@your-company.com", "EMAIL_ADDRESS"),
    ("ping 192.0.2.17 first", "IP_ADDRESS"),
    ("ping 10.1.2.3 first", "IP_ADDRESS"),
    ("the server runs on 127.0.0.1:8080", "IP_ADDRESS"),
    ("listen on fe80::1:2 and 2001:db8::17", "IP_ADDRESS"),
    ("DATABASE_URL=postgres://admin:s3cr3t99@localhost:5432/app", "URL_PASSWORD"),
]


@pytest.mark.parametrize(("text", "entity"), PLACEHOLDERS)
def test_placeholders_pass_and_are_counted_unless_switched_off(text: str, entity: str) -> None:
    passed = verdict(text)
    assert passed.reason is None and passed.prompt is None
    assert f"{entity} let through" in passed.counts
    assert verdict(text, "placeholders=false").counts[entity] > 0


@pytest.mark.parametrize(
    ("text", "entity"),
    [
        ("write to jane@acme.com", "EMAIL_ADDRESS"),
        ("write to jane@notexample.com", "EMAIL_ADDRESS"),
        ("ping 93.184.216.34 first", "IP_ADDRESS"),
        ("call +44 20 7946 9123", "PHONE_NUMBER"),
        ("DATABASE_URL=postgres://admin:s3cr3t99@db.acme.com:5432/app", "URL_PASSWORD"),
        ("pay with 4539 5787 6362 1486", "CREDIT_CARD"),
    ],
)
def test_values_that_may_be_somebodys_do_not(text: str, entity: str) -> None:
    assert verdict(text).counts == {entity: 1}


def test_a_teams_own_values_and_domains_pass_and_are_counted() -> None:
    text = "write to Help@Acme.com, jane@eu.acme.com or 93.184.216.34; not to jane@notacme.com"
    found = verdict(text, "values=[93.184.216.34]", "domains=[acme.com]")
    assert found.counts == {"EMAIL_ADDRESS": 1, "EMAIL_ADDRESS let through": 2, "IP_ADDRESS let through": 1}


def test_what_belongs_to_a_machine_is_masked_and_the_rest_of_the_prompt_stays() -> None:
    assert verdict("ssh root@93.184.216.34 fails").prompt.messages[0]["content"] == "ssh root@<IP_ADDRESS> fails"
