"""API keys, tokens and private keys.

recogniser       finds
api_keys         known formats of issuers: a prefix of KEYS and the rest, or one of OTHER_KEYS
tokens           JSON web tokens, and values of authorization headers
private_keys     PEM, OpenSSH, PGP and PuTTY keys
random_values    random values of unknown issuers, by a name or a prefix before them
"""

import base64
import json
import re
from collections.abc import Iterator
from itertools import chain, pairwise

from eagle3.prompts.privacy.passwords import PLACEHOLDER, entropy, has_letters_and_digits, is_random
from eagle3.prompts.privacy.recogniser import Span, matches, text_before

# What a key begins with → the rest of it, as its issuer documents it.
KEYS = {prefix: re.compile(body) for prefixes, body, _issuer in (
    ("AKIA ASIA", r"[A-Z0-9]{16}", "Amazon Web Services"),
    ("AIza", r"[\w-]{35}", "Google"), ("ya29.", r"[\w-]{30,300}", "Google"), ("GOCSPX-", r"[\w-]{28}", "Google"),
    ("ghp_ gho_ ghu_ ghs_", r"[A-Za-z0-9]{36}", "GitHub"), ("npm_", r"[A-Za-z0-9]{36}", "npm"),
    ("ghr_", r"[A-Za-z0-9]{36,76}", "GitHub"), ("github_pat_", r"[A-Za-z0-9]{22}_[A-Za-z0-9]{59}", "GitHub"),
    ("glpat- glptt- gldt- glrt- glcbt- glimt- glagent- gloas- glsoat- glffct- glft- GR1348941", r"[\w-]{16,80}",
     "GitLab"),
    ("xoxb- xoxp- xoxa- xoxr- xoxs- xapp-", r"[\w-]{20,250}", "Slack"),
    ("hooks.slack.com/services/ hooks.slack.com/workflows/ hooks.slack.com/triggers/",
     r"[TE]\w{6,14}/\w{6,20}/(?:\d{10,20}/)?\w{20,40}", "Slack"),
    ("sk-", r"(?:proj-|svcacct-|admin-|ant-(?:api|admin)\d\d-|or-v1-)?[\w-]{32,200}", "OpenAI, Anthropic, OpenRouter"),
    ("sk_live_ sk_test_ rk_live_ pk_live_", r"[A-Za-z0-9]{24,247}", "Stripe"),
    ("whsec_", r"[A-Za-z0-9]{32,64}", "Stripe"),
    ("SG.", r"[\w-]{22}\.[\w-]{43}", "SendGrid"), ("hf_", r"[A-Za-z0-9]{34}", "Hugging Face"),
    ("pypi-AgEIcHlwaS5vcmc", r"[\w-]{50,250}", "PyPI"), ("gsk_", r"[A-Za-z0-9]{52}", "Groq"),
    ("r8_", r"[A-Za-z0-9]{37,40}", "Replicate"), ("xai-", r"\w{70,90}", "xAI"),
    ("dop_v1_ doo_v1_ dor_v1_", r"[a-f0-9]{64}", "DigitalOcean"),
    ("shpat_ shpss_ shpca_ shppa_", r"[a-f0-9]{32}", "Shopify"), ("dapi", r"[a-f0-9]{32}", "Databricks"),
    ("sq0atp-", r"[\w-]{22}", "Square"), ("sq0csp-", r"[\w-]{43}", "Square"), ("tgp_v1_", r"[\w-]{43}", "Together"),
    ("lin_api_", r"[A-Za-z0-9]{40}", "Linear"), ("ntn_", r"[A-Za-z0-9]{46}", "Notion"),
    ("hvs.", r"[\w-]{24,150}", "HashiCorp Vault"), ("PMAK-", r"[a-f0-9]{24}-[a-f0-9]{34}", "Postman"),
    ("NRAK-", r"[A-Z0-9]{27}", "New Relic"), ("AGE-SECRET-KEY-1", r"[0-9A-Z]{58}", "age"),
    ("AccountKey=", r"[A-Za-z0-9+/]{86}==", "Azure"), ("dckr_pat_", r"[\w-]{27}", "Docker"),
    ("tskey-", r"[a-z]{3,9}-\w{8,20}-\w{16,40}", "Tailscale"), ("EAACEdEose0cBA", r"[A-Za-z0-9]{20,250}", "Facebook"),
    ("LTAI", r"[A-Za-z0-9]{12,20}", "Alibaba Cloud"), ("ATBB", r"[A-Za-z0-9]{24,32}", "Bitbucket"),
    ("CFPAT-", r"[\w-]{43,90}", "Contentful"), ("NRII-", r"[\w-]{26,32}", "New Relic"),
    ("nvapi-", r"[\w-]{60,72}", "NVIDIA"), ("rubygems_", r"[a-f0-9]{48}", "RubyGems"),
    ("glsa_", r"[A-Za-z0-9]{32}_[a-f0-9]{8}", "Grafana"), ("glc_", r"eyJ[\w+/-]{30,1000}={0,3}", "Grafana"),
    ("ops_", r"eyJ[\w+/-]{30,1000}={0,3}", "1Password"), ("sb_secret_", r"[\w-]{28,40}", "Supabase"),
    ("lsv2_pt_ lsv2_sk_", r"[a-f0-9]{32}_[a-f0-9]{10}", "LangSmith"), ("sbp_", r"[a-f0-9]{40}", "Supabase"),
    ("CCIPAT_", r"\w{22}_[a-f0-9]{40}", "CircleCI"), ("ATATT3xFfGF0", r"[\w=-]{160,220}", "Atlassian"),
    ("AQ.", r"Ab8[\w-]{40,60}", "Google"),
) for prefix in prefixes.split()}  # fmt: skip
OTHER_KEYS = re.compile("|".join((
    r"(?<!\w)\d{8,10}:[\w-]{35}(?![\w-])",  # Telegram
    r"(?:AC|SK)[a-f0-9]{32}",  # Twilio
    r"(?<![\w-])key-[a-f0-9]{32}",  # Mailgun
    r"[0-9a-f]{32}-us\d{1,2}(?!\w)",  # Mailchimp
    r"(?<![\w-])[MNO][\w-]{23,27}\.[\w-]{6}\.[\w-]{27,38}(?![\w-])",  # Discord
    r"(?<!\d)\d{15,16}\|[\w-]{27}(?![\w-])",  # Facebook
    r"(?<![\w.~-])[\w.~-]{3}\dQ~[\w.~-]{31,34}(?![\w.~-]{2})",  # Azure
    r"(?<!\w)1000\.[0-9a-f]{32}\.[0-9a-f]{32}",  # Zoho
    r"(?<!\w)00D\w{12,15}![\w.]{60,120}",  # Salesforce
    r"(?<!\w)pat[A-Za-z0-9]{14}\.[a-f0-9]{64}",  # Airtable
)), re.ASCII)  # fmt: skip


def api_keys(text: str) -> Iterator[Span]:
    """Find keys with an issuer's prefix, and formats of issuers without a prefix."""
    for start, body in KEYS.items():
        position = text.find(start)
        while position >= 0:
            match = body.match(text, position + len(start))
            if match and _ends_alone(text, position, match.end()) and is_random(match.group()):
                yield Span(position, match.end())
            position = text.find(start, match.end() if match else position + len(start))
    yield from matches(OTHER_KEYS, text, lambda match: _ends_alone(text, *match.span()) and is_random(match.group()))


def _ends_alone(text: str, start: int, end: int) -> bool:
    before, after = text_before(text, start, 1), text[end : end + 1]
    return not (before.isalnum() and before.isascii()) and not (after.isalnum() and after.isascii())


JWT = re.compile(r"(?<![\w-])(eyJ[\w-]{8,1000})\.[\w-]{2,8000}\.[\w-]{10,2000}", re.ASCII)
AUTHORIZATION = re.compile(r"\b(bearer|basic)\b[\s:=\"']{1,4}([\w.~+/-]{16,4000}={0,2})", re.ASCII | re.IGNORECASE)
AUTHORIZATION_HEADER = re.compile(
    r"\b(authorization|(?:x-)?(?:api|auth|access|private)-(?:token|key))[\"']?\s{0,2}[:=]\s{0,2}[\"']?"
    r"(?:(?!bearer|basic)[a-z-]{1,20}\s)?([\w.~+/-]{16,4000}={0,2})",
    re.ASCII | re.IGNORECASE,
)


def tokens(text: str) -> Iterator[Span]:
    """Find JSON web tokens whose header decodes, and values of bearer, token and basic authorization."""
    if "eyJ" in text:
        yield from matches(JWT, text, lambda match: _is_json(match[1]))
    for match in chain(AUTHORIZATION.finditer(text), AUTHORIZATION_HEADER.finditer(text)):
        value = match[2]
        if has_letters_and_digits(value) and is_random(value) and (match[1].lower() != "basic" or _is_login(value)):
            yield Span(*match.span(2))


def _is_json(segment: str) -> bool:
    try:
        return isinstance(json.loads(base64.urlsafe_b64decode(segment + "=" * (-len(segment) % 4))), dict)
    except (ValueError, RecursionError):
        return False


def _is_login(value: str) -> bool:
    try:
        password = base64.b64decode(value + "=" * (-len(value) % 4), validate=True).decode().partition(":")[2]
    except ValueError:
        return False
    return password != "" and not PLACEHOLDER.search(password)


PRIVATE_KEY = re.compile(
    r"-----BEGIN (?:[A-Z0-9]{1,12} ){0,3}PRIVATE KEY(?: BLOCK)?-----"
    r"|PuTTY-User-Key-File-\d: ?[\w-]{0,40}"
)
# Line ends, quotes and string joins of code, headers such as "Proc-Type: 4,ENCRYPTED", then base64. A header extends to
# the end of its line: with more than one way to match it, crafted text would take exponential time.
KEY_BODY = re.compile(r"(?:\s|\\[nr]|[\"'+,>#|]|[A-Za-z-]{1,30}: [^\n\\]{0,80}(?=[\n\\])){0,60}[A-Za-z0-9+/]{32}")
KEY_END = re.compile(r"-----END (?:[A-Z0-9]{1,12} ){0,3}PRIVATE KEY(?: BLOCK)?-----|Private-MAC: ?[0-9a-f]{1,64}")
ENCODED_KEY = re.compile(r"LS0tLS1CRUdJTi[A-Za-z0-9+/]{50,20000}={0,2}")  # "-----BEGIN" in base64


def private_keys(text: str) -> Iterator[Span]:
    """Find PEM, OpenSSH, PGP and PuTTY keys from first to last line, or to the end of a truncated text."""
    if "LS0tLS1CRUdJTi" in text:
        yield from matches(ENCODED_KEY, text, lambda match: b"PRIVATE KEY" in base64.b64decode(match.group()[:64]))
    position = 0
    while match := PRIVATE_KEY.search(text, position):
        position = match.end()
        if KEY_BODY.match(text, position):
            end = KEY_END.search(text, position)
            position = end.end() if end else len(text)
            yield Span(match.start(), position)


# --- unknown issuers: long random values, by a name or a prefix before them -------------------------------------------

VALUE = re.compile(r"(?<![\w+/.~-])[\w-][\w+/.~:-]{8,400}[\w=+/-]={0,2}(?![\w+/~])", re.ASCII)
SEPARATORS = re.compile(r"[_.:/~-]")
UUID = re.compile(r"[0-9a-z]{8}-(?:[0-9a-z]{4}-){3}[0-9a-z]{12}", re.IGNORECASE)  # some issuers use letters beyond f
NAMES = re.compile(
    r"key|secret|token|private|access|auth|passw|credential|bearer|client[ _-]?(?:id|sec)|webhook|api|sid\b|\bpwd"
    r"|(?<![a-z])pat(?![a-z])|(?<![a-z])(?:sk|rk|pk|pri|sdk)[_-]|[_-](?:live|prod)[_-]",
    re.IGNORECASE,
)
# Names of values that are random but not secret.
HARMLESS = re.compile(
    r"(?:sha\d*|md5|hash|commit|checksum|digest|integrity|etag|revision|uuid|guid|fingerprint|signature|public|rev|blob"
    r"|tree|https?|href|src|url|path|version|file|image|import|from|def|class|basic)\W{0,4}\s?\S{0,3}\Z|#\Z",
    re.IGNORECASE,
)
ASSIGNED = re.compile(r"(?<!\?token)[:=]\s*[\"'`]?\Z", re.IGNORECASE)  # the token of a badge is public
UNNAMED = re.compile(r"\s*(?:default|value)?\s*[:=]?\s*[\"'`]?", re.IGNORECASE)  # then the line above may have the name
OPEN_ENDS = ("=", ":", "(", "{", "[", ",")
LOOKED_UP = re.compile(r"(?:cache|primary|foreign|sort|partition|public|idempotency)[ _-]?key", re.IGNORECASE)
BEFORE = 40  # characters of the line in which the name may be
# A value is a secret if it has MANY_KINDS of characters (`is_random`), and
#
#     after a name of NAMES          letters and digits: NAMED_LENGTH, letters of one case: ONE_CASE_LENGTH,
#                                    letters of both: MIXED_LENGTH, in parts between capitals of MIXED_PART on average
#     after a name and = or :        letters and digits: SHORT_LENGTH
#     after a prefix like ISSUER     letters of one case and digits: ISSUED_LENGTH, of them ISSUED_DIGITS
#     after another prefix           digits and letters of both cases: PREFIXED_LENGTH
#
# …_ENTROPY is in bits, …_SWITCHES the share of characters followed by another kind: words and identifiers have fewer.
NAMED_LENGTH, NAMED_ENTROPY = 16, 3.0
ONE_CASE_LENGTH = 22
MIXED_LENGTH, MIXED_PART = 16, 2.5
SHORT_LENGTH, SHORT_ENTROPY, SHORT_SWITCHES = 10, 2.8, 0.3
ISSUER = re.compile(r"[a-z]{2,6}_")
ISSUED_LENGTH, ISSUED_DIGITS = 36, 6
PREFIXED_LENGTH, PREFIXED_ENTROPY, PREFIXED_SWITCHES = 24, 3.5, 0.35


def random_values(text: str) -> Iterator[Span]:
    """Find UUIDs, and values whose longest part between dashes, dots and the like is random."""
    for match in VALUE.finditer(text):
        before = _line_before(text, match.start())
        if "://" in match.group() or before.endswith("://"):
            yield from _in_url(match)
        elif not HARMLESS.search(before) and _is_secret(match.group(), before):
            yield Span(*match.span())


def _line_before(text: str, start: int) -> str:
    """Return the end of the line before a value, with the line above if this one has no name for it."""
    *above, line = text_before(text, start, BEFORE).rsplit("\n", 2)
    continued = above and above[-1].rstrip().endswith(OPEN_ENDS) and UNNAMED.fullmatch(line)
    return above[-1] + line if continued else line


def _in_url(url: re.Match[str]) -> Iterator[Span]:
    """Yield parts of a URL's path that are secrets by their prefix."""
    start = url.start()
    for part in url.group().split("/"):
        if len(part) >= NAMED_LENGTH and _is_secret(part, before=""):
            yield Span(start, start + len(part))
        start += len(part) + 1


def _is_secret(value: str, before: str) -> bool:
    uuid = UUID.search(value)
    body = uuid.group() if uuid else max(SEPARATORS.split(value), key=len)
    prefix = value.removesuffix(body) if value.endswith(body) else ""
    if NAMES.search(LOOKED_UP.sub("", f"{before} {prefix}")):
        return bool(uuid or _is_named_secret(body) or (ASSIGNED.search(before) and _is_short_secret(value)))
    return bool(prefix) and "/" not in value and _is_prefixed_secret(body, prefix)


def _is_named_secret(body: str) -> bool:
    if not is_random(body) or entropy(body) < NAMED_ENTROPY:
        return False
    if any(map(str.isdigit, body)):
        return len(body) >= NAMED_LENGTH and any(map(str.isalpha, body))
    if body.islower() or body.isupper():
        return len(body) >= ONE_CASE_LENGTH and body.isalpha()
    parts = 1 + sum(map(str.isupper, body[1:]))
    return len(body) >= MIXED_LENGTH and body.isalpha() and len(body) / parts <= MIXED_PART


def _is_short_secret(value: str) -> bool:
    return (
        len(value) >= SHORT_LENGTH and value.isalnum() and has_letters_and_digits(value)
        and is_random(value) and entropy(value) >= SHORT_ENTROPY and _switches(value) >= SHORT_SWITCHES
    )  # fmt: skip


def _is_prefixed_secret(body: str, prefix: str) -> bool:
    if HARMLESS.search(prefix):
        return False
    if ISSUER.fullmatch(prefix) and body.islower():
        return len(body) >= ISSUED_LENGTH and sum(map(str.isdigit, body)) >= ISSUED_DIGITS and is_random(body)
    kinds = any(map(str.isdigit, body)) and any(map(str.islower, body)) and any(map(str.isupper, body))
    return (
        kinds and len(body) >= PREFIXED_LENGTH and is_random(body) and entropy(body) >= PREFIXED_ENTROPY
        and _switches(body) >= PREFIXED_SWITCHES
    )  # fmt: skip


def _switches(body: str) -> float:
    """Return the share of characters that are followed by another kind: digit, lower or upper case."""
    kinds = [(char.isdigit(), char.isupper()) for char in body]
    return sum(one != other for one, other in pairwise(kinds)) / (len(kinds) - 1)
