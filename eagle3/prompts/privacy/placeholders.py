"""Findings that are let through: placeholder values that identify nobody, and a team's own values.

A comment on each set of placeholders names who reserved it for documentation, tests or private networks.
"""

import ipaddress
import re
from collections.abc import Callable
from urllib.parse import urlsplit

from eagle3.errors import InputError
from eagle3.settings.prompts import AllowedSettings

# RFC 2606 and 6761; GitHub's noreply addresses; Microsoft's fictitious companies; names such as your-company.
DOMAINS = re.compile(
    r"(?:.+\.)?(?:example(?:\.[a-z]{2,3}){1,2}|[^.]+\.(?:example|test|invalid|localhost|local)|localhost"
    r"|users\.noreply\.github\.com|contoso\.com|fabrikam\.com|adventure-works\.com|northwindtraders\.com"
    r"|(?:your|my|some)[-_]?(?:domain|company|site|website|organi[sz]ation|org|mail|email|server|host|app)\.[a-z.]{2,8}"
    r"|domain\.(?:com|org|net|tld))",
    re.IGNORECASE,
)

# Test cards of payment networks and processors (Stripe, PayPal, Adyen, Authorize.net); 400000… is Stripe's.
CARDS = re.compile(
    """400000\\d{10}|4242424242424242|4000056655665556|5555555555554444|2223003122003222|5200828282828210
    |5105105105105100|378282246310005|371449635398431|378734493671000|6011111111111117|6011000990139424
    |6011981111111113|3056930009020004|36227206271667|6555900000604105|3566002020360505|3530111333300000
    |620000000000000[05]|6200000000000047|6205500000000000004|4111111111111111|4012888888881881|4222222222222
    |30569309025904|38520000023237|5431111111111111|5424000000000015|4007000000027|370000000000002|6011000000000012
    |3088000000000017|38000000000006|4012000033330026|4005519200000004|4009348888881881|4500600000000061
    |5454545454545454|5500000000000004|340000000000009|30000000000004|6011000000000004|4444333322221111
    |4166676667666746|2222400070000005|5136333333333335|5585558555855583|4988438843884305|5577000055770004
    |4646464646464644|4400000000000008|5019717010103742|6331101999990016|6304000000000000|5018000000000009""",
    re.VERBOSE,
)

# Examples of the IBAN registry (ISO 13616, SWIFT) and of Wikipedia.
IBANS = frozenset((
    "AT611904300234573201", "BE68539007547034", "CH9300762011623852957", "CZ6508000000192000145399",
    "DE89370400440532013000", "DK5000400440116243", "EE382200221020145685", "ES9121000418450200051332",
    "FI2112345600000785", "FR1420041010050500013M02606", "GB29NWBK60161331926819", "GB33BUKB20201555555555",
    "GB82WEST12345698765432", "GR1601101250000000012300695", "HR1210010051863000160", "HU42117730161111101800000000",
    "IE29AIBK93115212345678", "IT60X0542811101000000123456", "LU280019400644750000", "NL91ABNA0417164300",
    "NO9386011117947", "PL61109010140000071219812874", "PT50000201501234567890154", "SE4550000000058398257466",
    "SK3112000000198742637541", "TR330006100519786457841326", "BR1800360305000010009795493C1",
    "SA0380000000608010167519", "AE070331234567890123456", "IL620108000000099999999",
))  # fmt: skip

# Numbers for films and books: NANPA's 555-01xx, Ofcom's, ARCEP's, the Bundesnetzagentur's, ACMA's. Digits alone.
PHONES = re.compile(
    r"(?:1|001)?[2-9]\d\d555(?:01\d\d|1212|0000|1234)"
    r"|(?:0044|44|0)(?:1632960|2079460|7700900|8081570|1154960|1214960)\d{3}"
    r"|(?:0033|33|0)(?:19900|26191|35301|46571|53649|63998)\d{4}|(?:0049|49|0)3023125\d{3}|(?:61|0)[2378](?:5550|7010)\d{4}"
)

# Published by the Social Security Administration, or typed as a dummy.
SSNS = frozenset(("078051120", "219099999", "123456789", "987654321", *(f"98765432{digit}" for digit in range(10))))

# Public resolvers: Cloudflare, Google, Quad9, OpenDNS, Level 3.
RESOLVERS = frozenset(map(ipaddress.ip_address, (
    "1.1.1.1", "1.0.0.1", "1.1.1.2", "1.1.1.3", "8.8.8.8", "8.8.4.4", "9.9.9.9", "9.9.9.10", "149.112.112.112",
    "208.67.222.222", "208.67.220.220", "4.2.2.1", "4.2.2.2", "4.2.2.3", "4.2.2.4", "4.2.2.5", "4.2.2.6",
    "2606:4700:4700::1111", "2606:4700:4700::1001", "2001:4860:4860::8888", "2001:4860:4860::8844", "2620:fe::fe",
    "2620:fe::9",
)))  # fmt: skip
# Documentation and benchmarks (RFC 5737, 3849, 9637, 2544), carrier-grade NAT (RFC 6598), counting up.
NETWORKS = tuple(map(ipaddress.ip_network, (
    "192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24", "198.18.0.0/15", "100.64.0.0/10", "2001:db8::/32",
    "3fff::/20", "1.2.3.4/32", "5.6.7.8/32", "4.3.2.1/32",
)))  # fmt: skip
MACS = re.compile(r"(?:00005e0053|001122334455|112233445566|0123456789ab|1234567890ab|aabbccddeeff|deadbeef\w{4})")

# Keys and tokens in the documentation of their issuers: AWS, Stripe, jwt.io.
KEYS = re.compile(
    r"\w{4}IOSFODNN7EXAMPLE|wJalrXUtnFEMI/K7MDENG\S*"
    r"|[sp]k_test_(?:4eC39HqLyjWDarjtT1zdp7dc|BQokikJOvBiI2HlWgH4olfQ2|TYooMQauvdEDq54NiTphI7jx)"
    r"|eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9\.eyJzdWIiOiIxMjM0NTY3ODkw\S*"
)


def _email(value: str) -> bool:
    return DOMAINS.fullmatch(value.replace("%40", "@").rpartition("@")[2]) is not None


def _address(value: str) -> bool:
    host = ipaddress.ip_address(value)
    if isinstance(host, ipaddress.IPv6Address) and host.ipv4_mapped is not None:
        host = host.ipv4_mapped
    return host.is_private or host in RESOLVERS or any(host in net for net in NETWORKS if net.version == host.version)


def _url(value: str) -> bool:
    """Tell whether the URL leads to the user's own machine or to none."""
    try:
        host = urlsplit(value if "://" in value else f"//{value}").hostname or ""
    except ValueError:
        return False
    return host == "localhost" or host.startswith("127.") or DOMAINS.fullmatch(host) is not None


def _digits(value: str) -> str:
    return "".join(filter(str.isdigit, value))


PLACEHOLDERS: dict[str, Callable[[str], bool]] = {
    "EMAIL_ADDRESS": _email,
    "IP_ADDRESS": _address,
    "URL_PASSWORD": _url,
    "CREDIT_CARD": lambda value: CARDS.fullmatch(_digits(value)) is not None,
    "IBAN": lambda value: "".join(filter(str.isalnum, value)).upper() in IBANS,
    "PHONE_NUMBER": lambda value: PHONES.fullmatch(_digits(value)) is not None,
    "US_SSN": lambda value: _digits(value) in SSNS,
    "MAC_ADDRESS": lambda value: MACS.fullmatch(re.sub("[^0-9a-f]", "", value.lower())) is not None,
    **dict.fromkeys(("API_KEY", "TOKEN", "PASSWORD"), lambda value: KEYS.fullmatch(value) is not None),
}
DOMAIN = re.compile(r"(?:@|%40|://(?:[^/@]*@)?)([^/:?#\s@]+)")  # of an email address or a URL


class Allowed:
    """Tells which findings are let through.

    placeholders: the values above; values, patterns: whole findings, ignoring case; domains: of email addresses and
    URLs, including subdomains.
    """

    def __init__(self, settings: AllowedSettings):
        self.placeholders = settings.placeholders
        self.values = {value.casefold() for value in settings.values}
        self.patterns = [_compiled(pattern) for pattern in settings.patterns]
        self.domains = tuple(f".{domain.casefold().lstrip('.@')}" for domain in settings.domains)

    def __call__(self, entity: str, value: str) -> bool:
        return (
            (self.placeholders and entity in PLACEHOLDERS and PLACEHOLDERS[entity](value))
            or value.casefold() in self.values
            or any(pattern.fullmatch(value) for pattern in self.patterns)
            or (bool(self.domains) and self._is_own(value))
        )

    def _is_own(self, value: str) -> bool:
        domain = DOMAIN.search(value)
        return domain is not None and f".{domain[1].casefold()}".endswith(self.domains)


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise InputError(
            f"prompts.privacy.allowed.patterns holds {pattern!r}, not a regular expression ({error}); correct it"
        ) from None
