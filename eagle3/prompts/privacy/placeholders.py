"""Findings that are let through: placeholder values that identify nobody, and a team's own values.

A comment on each set of placeholders names who reserved it for documentation or private networks.
"""

import ipaddress
import re
from collections.abc import Callable
from urllib.parse import urlsplit

from eagle3.settings.prompts import AllowedSettings

# RFC 2606 and 6761; GitHub's noreply addresses; Microsoft's fictitious companies; names such as your-company.
DOMAINS = re.compile(
    r"(?:.+\.)?(?:example(?:\.[a-z]{2,3}){1,2}|[^.]+\.(?:example|test|invalid|localhost|local)|localhost"
    r"|users\.noreply\.github\.com|contoso\.com|fabrikam\.com|adventure-works\.com|northwindtraders\.com"
    r"|(?:your|my|some)[-_]?(?:domain|company|site|website|organi[sz]ation|org|mail|email|server|host|app)\.[a-z.]{2,8}"
    r"|domain\.(?:com|org|net|tld))",
    re.IGNORECASE,
)

# Documentation and benchmarks (RFC 5737, 3849, 9637, 2544), carrier-grade NAT (RFC 6598), counting up.
NETWORKS = tuple(map(ipaddress.ip_network, (
    "192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24", "198.18.0.0/15", "100.64.0.0/10", "2001:db8::/32",
    "3fff::/20", "1.2.3.4/32", "5.6.7.8/32", "4.3.2.1/32",
)))  # fmt: skip


def _email(value: str) -> bool:
    return DOMAINS.fullmatch(value.replace("%40", "@").rpartition("@")[2]) is not None


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


PLACEHOLDERS: dict[str, Callable[[str], bool]] = {"EMAIL_ADDRESS": _email, "IP_ADDRESS": _address, "URL_PASSWORD": _url}
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
