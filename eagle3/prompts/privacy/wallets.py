"""Crypto wallets, recognised by the checksum that is part of each address."""

import hashlib
import re

from Crypto.Hash import keccak
from stdnum.bitcoin import b58decode, bech32_checksum

from eagle3.prompts.privacy.recogniser import Pattern, words

BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
BASE58_VERSIONS = (0x00, 0x05, 0x30, 0x32, 0x1E, 0x16, 0x4C, 0x10, 0x41)  # Bitcoin, Litecoin, Dogecoin, Dash, Tron
BASE58_LENGTH = 25  # bytes: version, hash of 20, checksum of 4
BECH32 = "qpzry9x8gf2tvdw0s3jn54khce6mua7l"
BECH32_CONSTANTS = (1, 0x2BC830A3)  # BIP-173 and, for taproot addresses, BIP-350
MANY_KINDS = 8  # of characters; a wallet's are as random as a hash


class CryptoWallet(Pattern):
    """Base58Check (Bitcoin, Litecoin, Dogecoin, Dash, Tron), Bech32(m) (Bitcoin, Litecoin, Cardano) and ERC-55."""

    entity = "CRYPTO_WALLET"
    pattern = re.compile(
        rf"(?P<ethereum>0x[0-9a-fA-F]{{40}})|(?P<base58>[13LMDXT7A9][{BASE58}]{{25,34}})"
        rf"|(?P<bech32>(?:bc|ltc|addr)1[{BECH32}]{{11,100}}|(?:BC|LTC)1[{BECH32.upper()}]{{11,100}})"
    )
    context = words(
        "wallets?", "eth", r"ether(?:eum)?", "address", "metamask", "erc-?20", "crypto", "usdt", "usdc", "send",
        "adresse",
        r"direcci[oó]n", "indirizzo", r"endere[cç]o", "adres", "billetera", "carteira", "portefeuille",
    )  # fmt: skip

    def valid(self, match: re.Match[str]) -> bool:
        address = match.group()
        if match["ethereum"]:
            return len(set(address)) > MANY_KINDS and (_one_case(address) or address == eip55(address))
        return _base58_valid(address) if match["base58"] else _bech32_valid(address.lower())

    def needs_context(self, match: re.Match[str]) -> bool:
        return _one_case(match.group()) if match["ethereum"] else False


def _one_case(address: str) -> bool:
    """Tell whether an Ethereum address lacks mixed case and with it a checksum: any 20 bytes look like it."""
    return address[2:] in (address[2:].lower(), address[2:].upper())


def eip55(address: str) -> str:
    """Return the address with its checksum in the case of its letters (ERC-55)."""
    digits = address[2:].lower()
    digest = keccak.new(digest_bits=256, data=digits.encode()).hexdigest()
    return "0x" + "".join(
        char.upper() if int(nibble, 16) >= 8 else char for char, nibble in zip(digits, digest, strict=False)
    )


def _base58_valid(address: str) -> bool:
    data = b58decode(address)
    checksum = hashlib.sha256(hashlib.sha256(data[:-4]).digest()).digest()[:4]
    return len(data) == BASE58_LENGTH and data[0] in BASE58_VERSIONS and data[-4:] == checksum


def _bech32_valid(address: str) -> bool:
    prefix, _, data = address.rpartition("1")
    expanded = [ord(char) >> 5 for char in prefix] + [0] + [ord(char) & 31 for char in prefix]
    return bech32_checksum(expanded + [BECH32.index(char) for char in data]) in BECH32_CONSTANTS
