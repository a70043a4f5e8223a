"""Keys by their issuers' forms, hashes of passwords, and assignments: made up here after what issuers document."""

import base64

import pytest

from eagle3.prompts.privacy.passwords import Password, PasswordHash
from eagle3.prompts.privacy.recogniser import Recogniser
from eagle3.prompts.privacy.secrets import ApiKey, PrivateKey

HEX, MIXED = "7d0f1b9e4c2a8d6f3b5e7c9a1f0d2b4e", "bK3xQ9vRt7LzW2mPd8NfY5hJc1GsTa6E4uQw0ZxC"
PEM = base64.b64encode(f"-----BEGIN PRIVATE KEY-----\n{MIXED * 8}".encode()).decode()
CERTIFICATE = base64.b64encode(f"-----BEGIN CERTIFICATE-----\n{MIXED * 8}".encode()).decode()


@pytest.mark.parametrize(
    ("recogniser", "secret"),
    [
        (ApiKey, f"glptt-{MIXED}"),
        (ApiKey, f"GR1348941{MIXED[:20]}"),
        (ApiKey, f"hooks.slack.com/workflows/T2H71EFLK/A047FK946NN/430780826188280067/{MIXED[:24]}"),
        (ApiKey, f"LTAI{MIXED[:20]}"),
        (ApiKey, f"{HEX}-us14"),
        (ApiKey, f"MTAy{MIXED[:20]}.GSwJyi.{MIXED[:38]}"),
        (ApiKey, f"130874276261258|{MIXED[:27]}"),
        (ApiKey, f"aB38Q~{MIXED[:34]}"),
        (ApiKey, f"1000.{HEX}.{HEX}"),
        (ApiKey, f"1234567890:{MIXED[:35]}"),
        (PrivateKey, PEM),
        (PasswordHash, f"$6$rounds=5000${MIXED}"),
        (PasswordHash, f"$2b$12${MIXED}0123456789abc"),
        (PasswordHash, f"$krb5asrep$23$user@acme.com:{HEX}${HEX}"),
        (Password, "wwf*2#86t64!fgh6yav"),
    ],
)
def test_a_secret_is_found_whole_in_the_middle_of_a_text(recogniser: type[Recogniser], secret: str) -> None:
    name = "get('SECRET_KEY', '" if recogniser is Password else "Why does '"
    text = f"{name}{secret}') not work?"
    assert [text[span.start : span.end] for span in recogniser(action="drop").find(text)] == [secret]


@pytest.mark.parametrize(
    ("recogniser", "text"),
    [
        (ApiKey, "glptt-xxxxxxxxxxxxxxxxxxxxxxxx"),
        (ApiKey, f"image-{HEX}-user"),
        (ApiKey, f"at 1234567890:{HEX}"),
        (PrivateKey, CERTIFICATE),
        (PasswordHash, "costs $5$ to $6$ each"),
        (Password, "to set a tolerance of 5%, pass tol=0.05."),
        (Password, "password-protected PKCS#8 keys"),
        (Password, "check('password', 'required')"),
    ],
)
def test_what_only_looks_alike_passes(recogniser: type[Recogniser], text: str) -> None:
    assert list(recogniser(action="drop").find(text)) == []
