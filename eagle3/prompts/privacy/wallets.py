"""Wallets of cryptocurrencies: addresses, most of them by their checksum, and what opens a wallet.

Formats: Base58Check and extended keys (Bitcoin and its relatives, Tron, Tezos, XRP with an alphabet of its own), Bech32
(BIP 173 and 350, also of Cosmos and Cardano), SS58 (Polkadot), CRC-16 (Stellar, TON). Ethereum's checksum needs a hash
that Python lacks, and Solana has none: these need a word nearby.
"""

import base64
import binascii
import hashlib
import re
from collections.abc import Iterator
from itertools import groupby

from eagle3.prompts.privacy.recogniser import Pattern, Span, has_context, matches, mentions, words

BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
OF_XRP = "rpshnaf39wBUDNEGHJKLM4PQRST7VWXYZ2bcdeCg65jkm8oFqi1tuvAxyz"
WORD58 = re.compile(r"(?<![A-Za-z0-9])[1-9A-HJ-NP-Za-km-z]{25,111}(?![A-Za-z0-9])")
ADDRESS_BYTES = range(23, 28)  # prefix, hash and checksum
SS58_BYTES = (35, 36)
SECRET_BYTES = (37, 38)  # a private key in wallet import format
EXTENDED_BYTES = 82  # extended keys, BIP 32
MONERO = re.compile(r"[48][0-9AB][1-9A-HJ-NP-Za-km-z]{93}")

BECH32 = re.compile(r"(?<![A-Za-z0-9])([a-z]{1,15}|[A-Z]{1,15})1([ac-hj-np-z02-9]{25,110}|[AC-HJ-NP-Z02-9]{25,110})\b")
BECH32_LETTERS = "qpzry9x8gf2tvdw0s3jn54khce6mua7l"
BECH32_GENERATOR = (0x3B6A57B2, 0x26508E6D, 0x1EA119FA, 0x3D4233DD, 0x2A1462B3)
BECH32_CONSTANTS = (1, 0x2BC830A3)

STELLAR_ACCOUNT = re.compile(r"(?<![A-Z0-9])G[A-Z2-7]{55}(?![A-Z0-9])")
STELLAR_SEED = re.compile(r"(?<![A-Z0-9])S[A-Z2-7]{55}(?![A-Z0-9])")
STELLAR_LENGTH = 56
TON = re.compile(r"(?<![\w-])[EUk0]Q[\w-]{46}(?![\w-])", re.ASCII)

WALLET_WORDS = words(
    "wallets?", r"crypto\w*", "eth", "ethereum", "erc ?20", "metamask", "usd[tc]", "bnb", "polygon", "solana", "sol",
    "phantom", "ledger", "airdrop", "coins?", "payout", r"donat\w*", "withdraw(?:al)?", "deposit", "sen[dt]",
    "transfer(?:red)?", "my address", "address",
)  # fmt: skip
ethereum = Pattern(
    re.compile(r"0x[0-9a-fA-F]{40}"), valid=lambda match: _is_varied(match.group()[2:]), context=WALLET_WORDS
)
solana = Pattern(
    re.compile(r"[1-9A-HJ-NP-Za-km-z]{43,44}"),
    valid=lambda match: len(_decoded(match.group(), BASE58)) == 32 and _is_varied(match.group()),
    context=words("solana", "sol", "phantom", "spl"),
)
LEAST_KINDS = 8  # of characters: 0x000…dead and the like belong to nobody


def addresses(text: str) -> Iterator[Span]:
    """Find addresses that have a checksum, and Monero's, which are as long as no other word."""
    yield from matches(WORD58, text, lambda match: _is_address(match.group()))
    yield from matches(BECH32, text, lambda match: _is_bech32(match[1].lower(), match[2].lower()))
    yield from matches(STELLAR_ACCOUNT, text, _has_crc)
    yield from matches(TON, text, _has_crc)


def secret_keys(text: str) -> Iterator[Span]:
    """Find private keys in wallet import format, extended ones, Stellar's seeds, and hexadecimal ones by their name."""
    yield from matches(WORD58, text, lambda match: _kind_of_base58(match.group()) == "secret")
    yield from matches(STELLAR_SEED, text, _has_crc)
    yield from hexadecimal_keys(text)


hexadecimal_keys = Pattern(
    re.compile(r"(?:0x)?[0-9a-fA-F]{64}"),
    valid=lambda match: _is_varied(match.group()),
    context=words("private ?keys?", "secret ?keys?", "priv ?key", "signing ?key", "wallet ?key"),
)

# --- seed phrases (BIP 39): 12 to 24 words of a list that has none of the commonest words --------------------------

PHRASE_GATES = (
    "seed", "mnemonic", "recovery", "backup", "words", "wallet", "metamask", "ledger", "trezor", "phantom",
    "exodus", "electrum", "wörter", "phrase secr", "wiederherstellung", "récupération", "recuperación",
)  # fmt: skip
PHRASE_WORDS = words(
    r"(?:seed|recovery|mnemonic)(?: (?:phrases?|words?|seed|key))?", "backup (?:phrases?|words?|seed|key|sheet)",
    "mnemonics?", "secret recovery phrase",
    "my (?:twelve|twenty four|12|24) words", "(?:12|24) w[öo]rter", "metamask", "ledger", "trezor", "phantom", "exodus",
    "electrum", "crypto wallets?", "(?:my|restore) wallet", "phrase secr[èe]te",
    r"wiederherstellungs\w*", r"phrase de r[ée]cup[ée]ration", r"frase (?:semilla|de recuperaci[oó]n)",
)  # fmt: skip
NUMBERED = r"(?:\d{1,2}[.): ]{1,2}\s?)?[a-z]{3,8}"  # 1. legal 2. winner …
PHRASE = re.compile(rf"(?<![A-Za-z]){NUMBERED}(?:(?:[ \t]{{1,3}}|,\s?|\s?\n){NUMBERED}){{11,29}}(?![A-Za-z])")
LETTERS = re.compile(r"[a-z]+")
LENGTHS = (12, 15, 18, 21, 24)
# Of the commonest English words, those that are not in BIP 39's list.
SENTENCE = frozenset(
    """
    the and are was were has had his her its our their from your not but been which could should would them
    these those with than here does did how who why words mnemonic
    """.split()  # noqa: SIM905
)


def seed_phrases(text: str) -> Iterator[Span]:
    if not mentions(text, PHRASE_GATES):
        return
    for match in PHRASE.finditer(text):
        found = [each for each in LETTERS.finditer(match.group()) if len(each.group()) > 2]
        runs = groupby(found, key=lambda each: each.group() in SENTENCE)
        run = max((list(of_run) for common, of_run in runs if not common), key=len, default=[])
        length = next((length for length in reversed(LENGTHS) if len(run) >= length), None)
        if length is None:
            continue
        start = match.start()
        span = Span(start + run[-length].start(), start + run[-1].end())
        if has_context(text, span, PHRASE_WORDS):
            yield span


# --- checksums -------------------------------------------------------------------------------------------------------


def _is_varied(text: str) -> bool:
    return len(set(text.lower())) >= LEAST_KINDS


def _decoded(word: str, alphabet: str) -> bytes:
    number = 0
    for letter in word:
        number = number * 58 + alphabet.index(letter)
    zeros = len(word) - len(word.lstrip(alphabet[0]))
    return bytes(zeros) + number.to_bytes((number.bit_length() + 7) // 8, "big")


def _kind_of_base58(word: str) -> str | None:
    """Return "address" or "secret" of a word with the checksum of Base58Check; None without."""
    for alphabet in (BASE58, OF_XRP) if word.startswith("r") else (BASE58,):
        content = _decoded(word, alphabet)
        if len(content) in ADDRESS_BYTES or len(content) in SECRET_BYTES or len(content) == EXTENDED_BYTES:
            digest = hashlib.sha256(hashlib.sha256(content[:-4]).digest()).digest()
            if digest[:4] == content[-4:] and _is_varied(word):
                secret = len(content) in SECRET_BYTES or (len(content) == EXTENDED_BYTES and word[1:4] == "prv")
                return "secret" if secret else "address"
    return None


def _is_address(word: str) -> bool:
    if _kind_of_base58(word) == "address" or MONERO.fullmatch(word):
        return True
    content = _decoded(word, BASE58)
    return len(content) in SS58_BYTES and hashlib.blake2b(b"SS58PRE" + content[:-2]).digest()[:2] == content[-2:]


def _is_bech32(prefix: str, data: str) -> bool:
    values = [ord(letter) >> 5 for letter in prefix] + [0] + [ord(letter) & 31 for letter in prefix]
    values += [BECH32_LETTERS.index(letter) for letter in data]
    checksum = 1
    for value in values:
        top = checksum >> 25
        checksum = (checksum & 0x1FFFFFF) << 5 ^ value
        for bit, generator in enumerate(BECH32_GENERATOR):
            checksum ^= generator if top >> bit & 1 else 0
    return checksum in BECH32_CONSTANTS


def _has_crc(match: re.Match[str]) -> bool:
    """Tell whether the last two bytes are the CRC-16 (XModem) of the others, in either order."""
    word = match.group()
    try:
        content = base64.b32decode(word) if len(word) == STELLAR_LENGTH else base64.b64decode(word, altchars="-_")
    except (ValueError, binascii.Error):
        return False
    checksum = binascii.crc_hqx(content[:-2], 0).to_bytes(2, "big")
    return content[-2:] in (checksum, checksum[::-1])
