"""Findings that are let through: placeholder values that identify nobody, and a team's own values.

A comment on each set of placeholders names who reserved it for documentation or private networks.
"""

import ipaddress
import re
from collections.abc import Callable
from urllib.parse import urlsplit

from eagle3.prompts.privacy.payment import extract_digits
from eagle3.settings.prompts import AllowedSettings

# RFC 2606 and 6761; GitHub's noreply addresses; Microsoft's fictitious companies; names such as your-company.
DOMAINS = re.compile(
    r"(?:.+\.)?(?:example(?:\.[a-z]{2,3}){1,2}|[^.]+\.(?:example|test|invalid|localhost|local)|localhost"
    r"|users\.noreply\.github\.com|contoso\.com|fabrikam\.com|adventure-works\.com|northwindtraders\.com"
    r"|(?:your|my|some)[-_]?(?:domain|company|site|website|organi[sz]ation|org|mail|email|server|host|app)\.[a-z.]{2,8}"
    r"|domain\.(?:com|org|net|tld)|(?:test|foo|bar|baz|sample|fake|dummy|[abc])\.(?:com|org|net|io|dev|co|de))",
    re.IGNORECASE,
)

# Documentation and benchmarks (RFC 5737, 3849, 9637, 2544), carrier-grade NAT (RFC 6598), counting up.
NETWORKS = tuple(map(ipaddress.ip_network, (
    "192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24", "198.18.0.0/15", "100.64.0.0/10", "2001:db8::/32",
    "3fff::/20", "1.2.3.4/32", "5.6.7.8/32", "4.3.2.1/32",
)))  # fmt: skip


# Mailboxes and domains that stand for any: user@gmail.com, name@company.com.
ANY_MAILBOX = re.compile(
    r"(?:test|foo|bar|baz|user(?:name)?|some(?:one|body)|nobody|name|e?mail|(?:your|my)[-_.]?(?:e?mail|name|address)"
    r"|first(?:name)?\.last(?:name)?|example|sample|dummy|no-?reply)\d{0,3}",
    re.IGNORECASE,
)
ANY_DOMAIN = re.compile(r"(?:company|somewhere|nowhere|address|doe)\.(?:com|org|net)", re.IGNORECASE)


def _email(value: str) -> bool:
    mailbox, _, domain = value.replace("%40", "@").rpartition("@")
    return any(
        found.fullmatch(part) for found, part in ((DOMAINS, domain), (ANY_DOMAIN, domain), (ANY_MAILBOX, mailbox))
    )


def _address(value: str) -> bool:
    host = ipaddress.ip_address(value)
    if isinstance(host, ipaddress.IPv6Address) and host.ipv4_mapped is not None:
        host = host.ipv4_mapped
    return host.is_private or any(host in net for net in NETWORKS if net.version == host.version)


def _url(value: str) -> bool:
    """Tell whether the URL leads to the user's own machine or to none."""
    try:
        host = urlsplit(value if "://" in value else f"//{value}").hostname or ""
    except ValueError:
        return False
    return host == "localhost" or host.startswith("127.") or DOMAINS.fullmatch(host) is not None


# What payment firms publish for tests (Stripe, PayPal, Adyen, Braintree, Worldpay, Checkout.com, Mercado Pago).
# Stripe's have the prefix 4000 00.
TEST_CARDS = frozenset(
    """
    4242424242424242 4000056655665556 4111111111111111 4012888888881881 4222222222222 4005519200000004 4009348888881881
    4012000033330026 4012000077777777 4500600000000061 4166676667666746 4988438843884305 4917610000000000
    4444333322221111 4911830000000 4917300800000000 4032035809742661 4263982640269299 4263970000005262
    4000002500003155 4000002760003184 5555555555554444 2223003122003222 5200828282828210 5105105105105100
    5454545454545454 2222400070000005 5500000000000004 5577000055770004 5100290029002909 2223000048400011
    5424000000000015 5425233430109903 2222420000001113 378282246310005 371449635398431 378734493671000 340000000000009
    370000000000002 374245455400126 6011111111111117 6011000990139424 6011981111111113 6011000000000004
    6011601160116611 3056930009020004 36227206271667 30569309025904 38520000023237 30000000000004 3566002020360505
    3530111333300000 3088000000000009 6555900000604105 6200000000000005 6200000000000047 6205500000000000004
    6759649826438453 6304000000000000 201400000000009 4543474002249996 5436031030606378 6771798021000008
    3569990010095841 6011000991300009 36259600000004 5031755734530604 5031433215406351 4509953566233704
    4235647728025682
    """.split()  # noqa: SIM905
)
# Others are made of few different digits, or have the same one six times in a row after the first four. Of random
# numbers with a right check digit about one in 7,000 is like that.
FEW_DIGITS = 4
REPEATED = re.compile(r"(\d)\1{5}")

# Reserved for fiction and examples: 555-0100 to 0199 (NANPA), and the ranges of Ofcom.
FICTIONAL_PHONE = re.compile(
    r"(?:1?\d{3})?55501\d\d|(?:44)?0?(?:7700900|1632960|2079460|1\d\d4960|8081570|3069990)\d{3}"
)
COUNTING = "01234567890123456789"


def _card(value: str) -> bool:
    digits = extract_digits(value)
    return (
        digits in TEST_CARDS
        or digits.startswith("400000")
        or len(set(digits)) <= FEW_DIGITS
        or REPEATED.search(digits, 4) is not None
    )


def _counting(value: str) -> bool:
    """Tell whether a number counts up or down, or is one digit only: 123456789, 000-00-0000."""
    digits = extract_digits(value)
    return digits in COUNTING or digits in COUNTING[::-1] or len(set(digits)) == 1


def _phone(value: str) -> bool:
    return _counting(value) or FICTIONAL_PHONE.fullmatch(extract_digits(value)) is not None


PLACEHOLDERS: dict[str, Callable[[str], bool]] = {
    "EMAIL_ADDRESS": _email,
    "IP_ADDRESS": _address,
    "URL_PASSWORD": _url,
    "CREDIT_CARD": _card,
    "BANK_ACCOUNT": _counting,
    "NATIONAL_ID": _counting,
    "PHONE_NUMBER": _phone,
}
DOMAIN = re.compile(r"(?:@|%40|://(?:[^/@]*@)?)([^/:?#\s@]+)")  # of an email address or a URL


class Allowed:
    """Tells which findings are let through.

    placeholders: the values above; values: whole findings, ignoring case; domains: of email addresses and URLs,
    including subdomains.
    """

    def __init__(self, settings: AllowedSettings):
        self.placeholders = settings.placeholders
        self.values = {value.casefold() for value in settings.values}
        self.domains = tuple(f".{domain.casefold().lstrip('.@')}" for domain in settings.domains)

    def __call__(self, entity: str, value: str) -> bool:
        domain = DOMAIN.search(value)
        return (
            (self.placeholders and entity in PLACEHOLDERS and PLACEHOLDERS[entity](value))
            or value.casefold() in self.values
            or (domain is not None and f".{domain[1].casefold()}".endswith(self.domains))
        )
