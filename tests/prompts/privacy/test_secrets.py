"""Keys by their issuers' forms, hashes of passwords, and assignments: made up here after what issuers document."""

import base64
from collections.abc import Callable

import pytest

from eagle3.prompts.privacy.passwords import assigned_passwords, password_hashes
from eagle3.prompts.privacy.secrets import api_keys, private_keys, random_values

HEX, MIXED = "7d0f1b9e4c2a8d6f3b5e7c9a1f0d2b4e", "bK3xQ9vRt7LzW2mPd8NfY5hJc1GsTa6E4uQw0ZxC"
PEM = base64.b64encode(f"-----BEGIN PRIVATE KEY-----\n{MIXED * 8}".encode()).decode()
CERTIFICATE = base64.b64encode(f"-----BEGIN CERTIFICATE-----\n{MIXED * 8}".encode()).decode()


@pytest.mark.parametrize(
    ("find", "secret"),
    [
        (api_keys, f"glptt-{MIXED}"),
        (api_keys, f"GR1348941{MIXED[:20]}"),
        (api_keys, f"hooks.slack.com/workflows/T2H71EFLK/A047FK946NN/430780826188280067/{MIXED[:24]}"),
        (api_keys, f"LTAI{MIXED[:20]}"),
        (api_keys, f"{HEX}-us14"),
        (api_keys, f"MTAy{MIXED[:20]}.GSwJyi.{MIXED[:38]}"),
        (api_keys, f"130874276261258|{MIXED[:27]}"),
        (api_keys, f"aB38Q~{MIXED[:34]}"),
        (api_keys, f"1000.{HEX}.{HEX}"),
        (api_keys, f"1234567890:{MIXED[:35]}"),
        (private_keys, PEM),
        (password_hashes, f"$6$rounds=5000${MIXED}"),
        (password_hashes, f"$2b$12${MIXED}0123456789abc"),
        (password_hashes, f"$krb5asrep$23$user@acme.com:{HEX}${HEX}"),
        (assigned_passwords, "wwf*2#86t64!fgh6yav"),
    ],
)
def test_a_secret_is_found_whole_in_the_middle_of_a_text(find: Callable, secret: str) -> None:
    name = "get('SECRET_KEY', '" if find is assigned_passwords else "Why does '"
    text = f"{name}{secret}') not work?"
    assert [text[span.start : span.end] for span in find(text)] == [secret]


@pytest.mark.parametrize(
    ("find", "text"),
    [
        (api_keys, "glptt-xxxxxxxxxxxxxxxxxxxxxxxx"),
        (api_keys, f"image-{HEX}-user"),
        (api_keys, f"at 1234567890:{HEX}"),
        (private_keys, CERTIFICATE),
        (password_hashes, "costs $5$ to $6$ each"),
        (assigned_passwords, "to set a tolerance of 5%, pass tol=0.05."),
        (assigned_passwords, "password-protected PKCS#8 keys"),
        (assigned_passwords, "check('password', 'required')"),
    ],
)
def test_what_only_looks_alike_passes(find: Callable, text: str) -> None:
    assert list(find(text)) == []


# Random values by their names and prefixes: forms from the rules of kingfisher (Apache-2.0), and what is as random


@pytest.mark.parametrize(
    "text",
    [
        "audd_key=1234567890abcdef1234567890abcdef",
        "transferwiseKEY=abcdef01-2345-6789-abcd-ef0123456789",
        "versioneyeACCESS-abcdef1234567890abcdef1234567890abcdef12",
        "languagelayer PRIVATE xy12za34vb56ui78op90qs12tr34ew56",
        "newscatcher_key = 0TmwjGlDiFJcHN_wODUUrEGBjC4Zh9xSnTQ2jiN83oU",
        "vercelTOKEN abcdefghijklmnopqrstuvwx",
        "figma pat = figd_rh1234567890123456789012345678901234abcd",
        "PMAK-5f8d04b3e9a1c70038b2d6a4-9f3e7Kc1XbR8s2LqT5vW0yZ4mN6p",
        "acmeKEY-8d1f2a3b-12d3-4a5b-9c6d-0e1f2a3b4c5d",
        "sdk-9qkz7w2m-x4vt-88jp-q1c0-m5nd2r7hy3ls",
        "acme token: -PqWvL9sT0yRbxGu7JmQeA",
        "acme_token=Q7ZK29PLX0WM",
        "acme token = tQzVrGhXWkMpLdJbNcRf",
        "acmeApiKey =\n  Q7ZK29PLX0WMB5TR8JHD",
        "variable acme_token {\n  default = Q7ZK29PLX0WMB5TR8JHD",
        "acx_7d0f1b9e4c2a8d6f3b5e7c9a1f0d2b4e6c8a0f1d",
        "see https://api.example.com/v1/pri_7d0f1b9e4c2a8d6f3b5e7c9a1f0d2b4e",
        "key sk_live_aB3xQ9vRt7LzW2mPd8Nf",
    ],
)
def test_a_random_value_with_a_name_or_a_prefix_is_a_secret(text: str) -> None:
    [span] = random_values(text)
    assert span.end == len(text)


@pytest.mark.parametrize(
    "text",
    [
        "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        "commit 43582a4f1e2d3c4b5a69788796a5b4c3d2e1f0a9",
        "cache-key-0cc175b9c0f1b6a831c399e269772661",
        "request 123e4567-e89b-12d3-a456-426614174000 failed",
        "the token: internationalization",
        "public key fingerprint 16:27:ac:a5:76:28:2d:36:63:1b:56:4d:eb:df:a6:48",
        "secret_name = my_application_configuration",
        "https://example.com/token/abcdefabcdef1234567890abcdefabcdef",
        "key = getAuthenticationTokenFromTheServer",
        "https://example.com/badge.svg?token=RXP95LE2XLQ",
        "https://docs.example.com/document/d/18OdLjruFNX74ILmgrdiCI9J1fQZuhzzRBCHV9URWto0/edit",
        "api/validators/#jsonschema.validators.Draft202012Validator",
        "commit:\n  43582a4f1e2d3c4b5a69788796a5b4c3d2e1f0a9",
        "rev_7d0f1b9e4c2a8d6f3b5e7c9a1f0d2b4e6c8a0f1d",
        "token = version2",
        "integrity sha256-a+WECgSc0MTdFtRCGGAFdl5uIy1ZLQXBeFff14edVN8=",
        "sha256-Z9vpnAn3rl541upWfaAhmTK38wpcBJpkOsrLimAn4o4=",
        ">>> token_hex(16)\n'f9bf78b9a18ce6d46a0cd2b0b86df9da'",
        "--private-key-file-name",
    ],
)
def test_what_is_random_and_opens_nothing_passes(text: str) -> None:
    assert list(random_values(text)) == []
