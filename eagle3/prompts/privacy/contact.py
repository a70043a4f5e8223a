"""Contact data: email addresses, phone numbers."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial

import phonenumbers
from phonenumbers import NumberParseException, PhoneNumber, PhoneNumberFormat
from publicsuffixlist import PublicSuffixList

from eagle3.errors import InputError
from eagle3.prompts.privacy.recogniser import (
    LOOK_BACK,
    Span,
    has_context,
    longest_runs,
    stands_alone,
    text_before,
    words,
)
from eagle3.settings.prompts import PhoneSettings

LOCAL_PART = re.compile(r"[\w.!#$%&'*+^`{|}~-]{1,64}")  # on the reversed text before the @
DOMAIN = re.compile(r"(?:[^\W_](?:[\w-]{0,62})\.){1,8}(?:xn--[a-z0-9-]{2,59}|[^\W\d_]{2,24})", re.IGNORECASE)
ASCII_DOMAIN = re.compile(DOMAIN.pattern, re.IGNORECASE | re.ASCII)  # Chinese may follow without a space: a@b.com谢谢
EMAIL_EDGES = ".!#$%&'*+^`{|}~-"  # quotes, list marks and the like around a local part
AT = re.compile("@|%40")  # the second in a URL's query
URL_ACCOUNT = re.compile(r"://[^\s/?#@]{0,128}\Z")  # user@host in a URL is for passwords.url_passwords
MACHINE_USERS = re.compile(
    r"git|hg|svn|(?:\d+\+)?.*no[-_.]?reply.*|do[-_.]?not[-_.]?reply|mailer-daemon", re.IGNORECASE
)


def emails(text: str) -> Iterator[Span]:
    """Find addresses with a public suffix; skips git@, no-reply and other machine users."""
    for at in AT.finditer(text) if "@" in text or "%40" in text else ():
        local = LOCAL_PART.match(text_before(text, at.start(), 64)[::-1])
        if local is None or (domain := _domain(text, at.end())) is None:
            continue
        user = local.group()[::-1].lstrip(EMAIL_EDGES)
        start = at.start() - len(user)
        if not user or MACHINE_USERS.fullmatch(user) or URL_ACCOUNT.search(text_before(text, start, 130)):
            continue
        yield Span(start, domain.end())


def _domain(text: str, start: int) -> re.Match[str] | None:
    """Match a domain with a public suffix: a matrix product `weights@x.transpose` has none."""
    domains = (pattern.match(text, start) for pattern in (DOMAIN, ASCII_DOMAIN))
    return next((each for each in domains if each and _public_suffixes().publicsuffix(each[0].lower())), None)


@cache
def _public_suffixes() -> PublicSuffixList:
    return PublicSuffixList(accept_unknown=False)


# Groups of digits with the usual separators. A run of more than 10 groups is a table of numbers.
NUMBER_RUN = re.compile(
    r"[+(\d] ?\(?\d{0,15}(?:(?:\(0\) ?[-/.]? ?|\) ?[-/.]? ?| ?[-/.] ?| |(?=\(\d\d))\(?\d{1,15}){0,31}"
)
DIGITS = re.compile(r"\d+")
EXTENSION = re.compile(r" ?(?:x|ext\.? ?)\d{1,6}(?!\w)", re.IGNORECASE)
NORTH_AMERICAN = re.compile(r"(?:(?:001|1)[-. ])?(?:\(\d{3}\) ?|\d{3}[-. ])\d{3}[-. ]\d{4}")  # no plan has all codes
MAX_GROUPS = 10
MIN_DIGITS, MIN_NATIONAL_DIGITS, MAX_DIGITS = 7, 8, 18
INTERNATIONAL_PREFIX = re.compile(r"(?:00|011)[ -]?(?=[1-9])")
LONG_NUMBER = 10
# Neighbours that make it part of another number, unless a word says phone.
PART_BEFORE, PART_AFTER = re.compile(r"\d\w{0,8}[ -]\Z|[-#/]\Z"), re.compile(r" ?[-/=] ?\w")
DECIMAL = re.compile(r"\+?\d+\.\d+")
DATE = re.compile(r"\b\d{1,2}([-./ ])\d{1,2}\1(?:19|20)\d\d\b|\b(?:19|20)\d\d([-./ ])\d{1,2}\2\d{1,2}\b")

# Right before a number of any country, whether or not it fits a numbering plan.
CALLED = re.compile(
    r"(?:\b(?:(?:tele)?(?:phone|fax)|tel|mobile?|cell|handy|whatsapp|t[ée]l[ée]fon[oe]?|desk|office)"
    r"(?: (?:number|no|nr))?\.?|\bcall (?:(?:me|us|him|her|them) )?(?:on|at|under)"
    r"|\b(?:answering|reached|reach me) (?:at|on))(?: is)?[\s:=\"']{1,4}\Z",
    re.IGNORECASE,
)
LONGEST_CALLED = 30

PHONE_WORDS = words(
    r"(?:tele)?phones?", "tel", "call", "calling", "mobile", "cell", "text me", "whatsapp", "sms", "fax", "ring",
    "dial", "reach", "contact", "hotline", "signal", "telegram", "(?:my|his|her|their|our) numbers?", r"messag\w{1,4}",
    "answering", "office", r"t[ée]l[ée]phon\w{0,9}", "t[ée]l",
    "portable", r"appell?e\w{0,3}", r"joi\w{2,5}", "handy(?:nummer)?", r"tel[eé]f[oó]n\w{0,9}", r"(?:an)?ruf\w{0,6}",
    r"erreich\w{0,5}", "mobil", "m[óo]vil", "celular", r"ll[áa]m\w{1,6}", "cellulare", r"chiam\w{1,6}",
    r"telefoon\w{0,6}", r"mobiel\w{0,6}", "bel", "bellen", r"liga\w{0,3}", "ligue", "zap", "फ़ोन", "फोन", "मोबाइल",
    r"\w{0,9}(?:电话|手机|電話|携帯)\w{0,9}",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Phones(PhoneSettings):
    """Numbers that are valid in the numbering plan of their country (phonenumbers).

    International forms need no context. National forms must be valid in one of `regions` (ISO 3166 codes), and either
    have that region's usual groups of digits or a word such as "call" nearby; in `called_regions` they need the word.
    """

    entity = "PHONE_NUMBER"

    def __post_init__(self) -> None:
        for key, codes in (("regions", self.regions), ("called_regions", self.called_regions)):
            if unknown := sorted(set(codes) - phonenumbers.SUPPORTED_REGIONS):
                raise InputError(
                    f"prompts.privacy.phone.{key} holds {unknown[0]}, no ISO 3166 code of a country with phone "
                    f"numbers; write e.g. GB"
                )

    def find(self, text: str) -> Iterator[Span]:
        for run in NUMBER_RUN.finditer(text):
            if run.end() - run.start() < MIN_DIGITS:
                continue
            groups = [Span(*group.span()) for group in DIGITS.finditer(text, *run.span())]
            if len(groups) <= MAX_GROUPS:  # in a table, other numbers are next to a phone's
                groups[0] = groups[0]._replace(start=run.start())  # with its + or bracket
                in_context = has_context(text, Span(*run.span()), PHONE_WORDS)
                is_phone = partial(self._is_phone, text, Span(*run.span()), in_context)
                yield from longest_runs(groups, MAX_GROUPS, is_phone)

    def _is_phone(self, text: str, run: Span, in_context: bool, span: Span) -> bool:
        number = text[span.start : span.end]
        count = sum(map(str.isdigit, number))
        extension = EXTENSION.match(text, span.end)  # "x123" right after the number
        whole = Span(span.start, extension.end()) if extension else span
        if not MIN_DIGITS <= count <= MAX_DIGITS or DECIMAL.fullmatch(number) or not stands_alone(text, whole):
            return False
        if CALLED.search(text_before(text, span.start, LONGEST_CALLED)) and not DATE.search(number):
            return True
        number = number.replace("(0)", "")  # +44 (0)20 …
        if number[0] == "+":
            # Numbering plans change, and people mistype: a possible length is enough in context.
            is_number = phonenumbers.is_possible_number if in_context else phonenumbers.is_valid_number
            return _parsed(number, is_number=is_number) is not None
        if NORTH_AMERICAN.fullmatch(number) and (in_context or extension or number[0] == "("):
            return True
        if (prefix := INTERNATIONAL_PREFIX.match(number)) and _parsed(f"+{number[prefix.end() :]}"):
            return True
        if count < MIN_NATIONAL_DIGITS or DATE.search(number):
            return False
        before = text_before(text, span.start, LOOK_BACK)
        if not in_context and (span != run or PART_BEFORE.search(before) or PART_AFTER.match(text, span.end)):
            return False
        return self._is_national(number, in_context)

    def _is_national(self, number: str, in_context: bool) -> bool:
        groups = DIGITS.findall(number)
        # Without context, two groups of digits need a trunk 0 or an area code in brackets.
        if not in_context and (len(groups) == 1 or (len(groups) == 2 and number[0] not in "0(")):
            return False
        regions = [*self.regions, *(self.called_regions if in_context else ())]
        phones = (phone for region in regions if (phone := _parsed(number, region)))
        return any(_written_as_usual(groups, phone, in_context=in_context) for phone in phones)


def _parsed(
    number: str,
    region: str | None = None,
    is_number: Callable[[PhoneNumber], bool] = phonenumbers.is_valid_number,
) -> PhoneNumber | None:
    try:
        phone = phonenumbers.parse(number, region)
    except NumberParseException:
        return None
    return phone if is_number(phone) else None


def _written_as_usual(groups: list[str], phone: PhoneNumber, *, in_context: bool) -> bool:
    """Tell whether the digits are those of the region's national format and, without context, in its groups.

    The format has the trunk 0 if there is one; numbers of ten digits and more are also written without it. After a 0
    only the area code is compared: German numbers have no fixed groups.
    """
    usual = DIGITS.findall(phonenumbers.format_number(phone, PhoneNumberFormat.NATIONAL))
    written, expected = "".join(groups), "".join(usual)
    without_trunk = expected[expected[0] == "0" and len(expected) > LONG_NUMBER :]
    if written not in (expected, without_trunk, f"1{expected}"):
        return False
    if in_context:
        return True
    if written[0] == "0":
        return groups[0] == usual[0]
    return [usual[0].lstrip("0"), *usual[1:]] in (groups, groups[1:])
