"""What opens doors for programs: API keys, tokens, private keys."""

import base64
import binascii
import json
import re
from collections.abc import Iterator
from itertools import chain
from typing import ClassVar

from eagle3.prompts.privacy.passwords import PLACEHOLDER, is_random
from eagle3.prompts.privacy.recogniser import Recogniser, Span

# Prefix, then what the issuer's documentation says follows.
KEYS = {
    "AKIA": r"[A-Z0-9]{16}", "ASIA": r"[A-Z0-9]{16}", "AIza": r"[\w-]{35}", "ya29.": r"[\w-]{30,300}",
    "GOCSPX-": r"[\w-]{28}",
    "ghp_": r"[A-Za-z0-9]{36}", "gho_": r"[A-Za-z0-9]{36}", "ghu_": r"[A-Za-z0-9]{36}", "ghs_": r"[A-Za-z0-9]{36}",
    "ghr_": r"[A-Za-z0-9]{36,76}", "github_pat_": r"[A-Za-z0-9]{22}_[A-Za-z0-9]{59}",
    **dict.fromkeys(
        ("glpat-", "glptt-", "gldt-", "glrt-", "glcbt-", "glimt-", "glagent-", "gloas-", "glsoat-", "glffct-", "glft-",
         "GR1348941"),
        r"[\w-]{16,80}",
    ),
    "xoxb-": r"[\w-]{20,250}", "xoxp-": r"[\w-]{20,250}", "xoxa-": r"[\w-]{20,250}", "xoxr-": r"[\w-]{20,250}",
    "xoxs-": r"[\w-]{20,250}", "xapp-": r"[\w-]{20,250}",
    **dict.fromkeys(("hooks.slack.com/services/", "hooks.slack.com/workflows/", "hooks.slack.com/triggers/"),
                    r"[TE]\w{6,14}/\w{6,20}/(?:\d{10,20}/)?\w{20,40}"),
    "sk-": r"(?:proj-|svcacct-|admin-|ant-(?:api|admin)\d\d-|or-v1-)?[\w-]{32,200}", "sk_live_": r"[A-Za-z0-9]{24,247}",
    "sk_test_": r"[A-Za-z0-9]{24,247}", "rk_live_": r"[A-Za-z0-9]{24,247}", "pk_live_": r"[A-Za-z0-9]{24,247}",
    "whsec_": r"[A-Za-z0-9]{32,64}", "SG.": r"[\w-]{22}\.[\w-]{43}", "hf_": r"[A-Za-z0-9]{34}",
    "npm_": r"[A-Za-z0-9]{36}",
    "pypi-AgEIcHlwaS5vcmc": r"[\w-]{50,250}", "gsk_": r"[A-Za-z0-9]{52}", "r8_": r"[A-Za-z0-9]{37,40}",
    "xai-": r"\w{70,90}",
    "dop_v1_": r"[a-f0-9]{64}",
    "shpat_": r"[a-f0-9]{32}", "shpss_": r"[a-f0-9]{32}", "sq0atp-": r"[\w-]{22}", "sq0csp-": r"[\w-]{43}",
    "dapi": r"[a-f0-9]{32}",
    "lin_api_": r"[A-Za-z0-9]{40}", "ntn_": r"[A-Za-z0-9]{46}", "hvs.": r"[\w-]{24,150}",
    "PMAK-": r"[a-f0-9]{24}-[a-f0-9]{34}",
    "NRAK-": r"[A-Z0-9]{27}", "AGE-SECRET-KEY-1": r"[0-9A-Z]{58}",
    "AccountKey=": r"[A-Za-z0-9+/]{86}==",
    "dckr_pat_": r"[\w-]{27}", "tskey-": r"[a-z]{3,9}-\w{8,20}-\w{16,40}", "EAACEdEose0cBA": r"[A-Za-z0-9]{20,250}",
    "LTAI": r"[A-Za-z0-9]{12,20}", "ATBB": r"[A-Za-z0-9]{24,32}", "CFPAT-": r"[\w-]{43,90}", "NRII-": r"[\w-]{26,32}",
}  # fmt: skip


class ApiKey(Recogniser):
    """Keys with the prefix of their issuer, and the forms of others that have none."""

    entity = "API_KEY"
    bodies: ClassVar = {start: re.compile(body) for start, body in KEYS.items()}
    others = re.compile(
        # Telegram, Twilio, Mailgun, Mailchimp; Discord, Facebook; Azure, Zoho, Salesforce
        r"(?<!\w)\d{8,10}:[\w-]{35}(?![\w-])|(?:AC|SK)[a-f0-9]{32}|(?<![\w-])key-[a-f0-9]{32}|[0-9a-f]{32}-us\d{1,2}(?!\w)"
        r"|(?<![\w-])[MNO][\w-]{23,27}\.[\w-]{6}\.[\w-]{27,38}(?![\w-])|(?<!\d)\d{15,16}\|[\w-]{27}(?![\w-])"
        r"|(?<![\w.~-])[\w.~-]{3}\dQ~[\w.~-]{31,34}(?![\w.~-]{2})"
        r"|(?<!\w)1000\.[0-9a-f]{32}\.[0-9a-f]{32}|(?<!\w)00D\w{12,15}![\w.]{60,120}",
        re.ASCII,
    )
    gates = (":", "AC", "SK", "key-", "-us", ".", "|", "Q~", "!")

    def find(self, text: str) -> Iterator[Span]:
        for start, body in self.bodies.items():
            position = text.find(start)
            while position >= 0:
                match = body.match(text, position + len(start))
                if match and _ends_alone(text, position, match.end()) and is_random(match.group()):
                    yield Span(position, match.end())
                position = text.find(start, match.end() if match else position + len(start))
        if any(gate in text for gate in self.gates):
            for match in self.others.finditer(text):
                if _ends_alone(text, *match.span()) and is_random(match.group()):
                    yield Span(*match.span())


def _ends_alone(text: str, start: int, end: int) -> bool:
    before, after = text[max(0, start - 1) : start], text[end : end + 1]
    return not (before.isalnum() and before.isascii()) and not (after.isalnum() and after.isascii())


class Token(Recogniser):
    """JSON web tokens (their header decodes) and the values of bearer, token and basic authorization."""

    entity = "TOKEN"
    jwt = re.compile(r"(?<![\w-])(eyJ[\w-]{8,1000})\.[\w-]{2,8000}\.[\w-]{10,2000}", re.ASCII)
    authorization = re.compile(r"\b(bearer|basic)\b[\s:=\"']{1,4}([\w.~+/-]{16,4000}={0,2})", re.ASCII | re.IGNORECASE)
    header = re.compile(
        r"\b(authorization|(?:x-)?(?:api|auth|access|private)-(?:token|key))[\"']?\s{0,2}[:=]\s{0,2}[\"']?"
        r"(?:(?!bearer|basic)[a-z-]{1,20}\s)?([\w.~+/-]{16,4000}={0,2})",
        re.ASCII | re.IGNORECASE,
    )

    def find(self, text: str) -> Iterator[Span]:
        for match in self.jwt.finditer(text) if "eyJ" in text else ():
            if _is_json(match[1]):
                yield Span(*match.span())
        for match in chain(self.authorization.finditer(text), self.header.finditer(text)):
            value = match[2]
            letters_and_digits = any(map(str.isdigit, value)) and any(map(str.isalpha, value))
            if letters_and_digits and is_random(value) and (match[1].lower() != "basic" or _is_login(value)):
                yield Span(*match.span(2))


def _is_json(segment: str) -> bool:
    try:
        return isinstance(json.loads(base64.urlsafe_b64decode(segment + "=" * (-len(segment) % 4))), dict)
    except (ValueError, binascii.Error, RecursionError):
        return False


def _is_login(value: str) -> bool:
    try:
        password = base64.b64decode(value + "=" * (-len(value) % 4), validate=True).decode().partition(":")[2]
    except ValueError:
        return False
    return password != "" and not PLACEHOLDER.search(password)


class PrivateKey(Recogniser):
    """PEM, OpenSSH, PGP and PuTTY private keys, from their first line to their last, or to the end of a cut text."""

    entity = "PRIVATE_KEY"
    begin = re.compile(
        r"-----BEGIN (?:[A-Z0-9]{1,12} ){0,3}PRIVATE KEY(?: BLOCK)?-----"
        r"|PuTTY-User-Key-File-\d: ?[\w-]{0,40}"
    )
    # Line ends, quotes and joins of code, headers such as "Proc-Type: 4,ENCRYPTED", then base64. A header runs to
    # the end of its line, so that there is one way to read it: else crafted ones would have exponentially many.
    body = re.compile(r"(?:\s|\\[nr]|[\"'+,>#|]|[A-Za-z-]{1,30}: [^\n\\]{0,80}(?=[\n\\])){0,60}[A-Za-z0-9+/]{32}")
    end = re.compile(r"-----END (?:[A-Z0-9]{1,12} ){0,3}PRIVATE KEY(?: BLOCK)?-----|Private-MAC: ?[0-9a-f]{1,64}")

    encoded = re.compile(r"LS0tLS1CRUdJTi[A-Za-z0-9+/]{50,20000}={0,2}")  # "-----BEGIN" in base64

    def find(self, text: str) -> Iterator[Span]:
        for encoded in self.encoded.finditer(text) if "LS0tLS1CRUdJTi" in text else ():
            if b"PRIVATE KEY" in base64.b64decode(encoded.group()[:64]):
                yield Span(*encoded.span())
        position = 0
        while match := self.begin.search(text, position):
            position = match.end()
            if self.body.match(text, position):
                end = self.end.search(text, position)
                position = end.end() if end else len(text)
                yield Span(match.start(), position)
