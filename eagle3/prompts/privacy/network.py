"""Addresses of machines: IP and MAC."""

import ipaddress
import re
from collections.abc import Iterator

from eagle3.prompts.privacy.recogniser import Pattern, Span, stands_alone, text_before

IPV4 = re.compile(r"\d{1,3}(?:\.\d{1,3}){3}(/\d{1,2})?(?!\d)")
IPV6 = re.compile(r"[0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f]{0,4}){2,40}(?:(?<=:)\d{1,3}(?:\.\d{1,3}){3})?(/\d{1,3})?")
BEFORE_VERSION = re.compile(
    r"(?:(?:\b(?:v|ver|release|python|java|node|php|ruby|kernel|chrome|firmware|build|(?:up|down)graded? to|sections?"
    r"|chapter|clause|oid)|version[a-z]{0,3}|\w[@-])(?:[ :#=\"'(>]|is|to|from){0,8}"
    r"|[=<>~^!]= {0,2}|(?:\A|[\s(\"'`;])[a-z][\w+-]{1,20}/)\Z",  # numpy==1.2.3.4, but ip == "…"; nginx/1.2.3.4
    re.IGNORECASE,
)
LOGIN = re.compile(
    r"\b(?:(?:ssh|scp|sftp|rsync|mosh)\b[^\n]{0,60}|root|admin|ubuntu|debian|centos|ec2-user|deploy|pi|user|postgres)@\Z",
    re.IGNORECASE,
)
AFTER_VERSION = re.compile(
    r"[-+](?:rc|alpha|beta|a|b|dev|snapshot|final|r|\d)|\.(?:tar|zip|whl|jar|deb|rpm|exe|dll|so|post|dev|in-addr)", re.I
)
LONGEST_VERSION_WORDS, LONGEST_LOGIN = 30, 80
# Networks of hosts; other hex digits with colons are slices, durations or C++ names.
IPV6_HOSTS = [ipaddress.ip_network(network) for network in ("::1", "2000::/3", "fc00::/7", "fe80::/10", "64:ff9b::/96")]
EIGHT_GROUPS = re.compile(r"[0-9A-Fa-f]{1,4}(?::[0-9A-Fa-f]{1,4}){7}")  # nothing else has this form


def ip_addresses(text: str) -> Iterator[Span]:
    """Find IPv4 and IPv6 addresses of hosts; skips multicast, networks, masks and versions."""
    for match in IPV4.finditer(text) if "." in text else ():
        if stands_alone(text, Span(*match.span())) and not _is_version(text, match):
            yield from _host(match)
    for match in IPV6.finditer(text) if "::" in text or text.count(":") > 6 else ():
        if stands_alone(text, Span(*match.span())):
            yield from _host(match)


def _host(match: re.Match[str]) -> Iterator[Span]:
    address, _, prefix = match.group().partition("/")
    try:
        host = ipaddress.ip_address(address)
        network = ipaddress.ip_network(match.group(), strict=False) if prefix else None
    except ValueError:
        return
    whole_network = network is not None and host == network.network_address and network.num_addresses > 1
    written_out = EIGHT_GROUPS.fullmatch(address) is not None and not address.replace(":", "").isdecimal()
    if not whole_network and _is_host(host, written_out=written_out):
        yield Span(match.start(), match.start() + len(address))


def _is_host(host: ipaddress.IPv4Address | ipaddress.IPv6Address, *, written_out: bool = False) -> bool:
    if isinstance(host, ipaddress.IPv6Address):
        if host.ipv4_mapped is not None:
            return _is_host(host.ipv4_mapped)
        if not (written_out or any(host in network for network in IPV6_HOSTS)):
            return False
    elif host.packed.endswith(b"\0\0") or host.packed[0] in (0, 255):  # 10.0.0.0, 255.255.255.0
        return False
    return not (host.is_multicast or host.is_unspecified or (host.version == 4 and host.is_reserved))


def _is_version(text: str, match: re.Match[str]) -> bool:
    if LOGIN.search(text_before(text, match.start(), LONGEST_LOGIN)):
        return False
    before = text_before(text, match.start(), LONGEST_VERSION_WORDS)
    return bool(BEFORE_VERSION.search(before) or AFTER_VERSION.match(text, match.end()))


# Documentation (RFC 7042), IPv4 multicast, bridges, IPv6 multicast.
NO_DEVICE = ("00005e0053", "01005e", "0180c2", "3333")
LONGER_BEFORE = re.compile(r"(?:^|[^0-9A-Z])[0-9A-F]{2}[:-]\Z", re.IGNORECASE)  # then it is a fingerprint


def _is_device(match: re.Match[str]) -> bool:
    if LONGER_BEFORE.search(text_before(match.string, match.start(), 4)):
        return False
    digits = re.sub("[^0-9a-f]", "", match.group().lower())
    # Six pairs of decimal digits joined by dashes, or a number with two points, are usually no MAC address.
    if digits.isdecimal() and match["gap"] != ":":
        return False
    return len(set(digits)) > 2 and not digits.startswith(NO_DEVICE)


mac_addresses = Pattern(  # EUI-48 as IEEE 802, Windows and Cisco write it
    re.compile(
        r"[0-9A-F]{2}(?P<gap>[:-])[0-9A-F]{2}(?:(?P=gap)[0-9A-F]{2}){4}(?!(?P=gap)[0-9A-F])|[0-9A-F]{4}\.[0-9A-F]{4}\.[0-9A-F]{4}",
        re.IGNORECASE,
    ),
    valid=_is_device,
)
