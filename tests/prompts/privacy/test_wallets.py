"""Checksums of wallets against addresses that others published: in the specifications, by exchanges and foundations."""

import pytest

from eagle3.prompts.privacy.payment import crypto_wallets

ETHEREUM = (  # ERC-55: upper case, lower case, mixed
    "0x52908400098527886E0F7030069857D2E4169EE7", "0x8617E340B3D01FA5F11F306F4090FD50E238070D",
    "0xde709f2102306220921060314715629080e2fb77", "0x27b1fdb04752bbc536007a920d24acb045561c26",
    "0x5aAeb6053F3E94C9b9A09f33669435E7Ef1BeAed", "0xfB6916095ca1df60bB79Ce92cE3Ea74c37c5d359",
    "0xdbF03B407c01E7cD3CBea99509d93f8DDDC8C6FB", "0xD1220A0cf47c7B9Be7A2E6BA89F429762e7b9aDb",
)  # fmt: skip
BASE58 = (
    "1A1zP1eP5QGefi2DMPTfTL5SLmv7DivfNa",  # Bitcoin's first block
    "3J98t1WpEZ73CNmQviecrnyiWrnqRhWNLy",  # BIP-13's form, of a script
    "LM2WMpR1Rp6j3Sa59cMXMs1SPzj9eXpGc1",  # Litecoin
    "MVcg9uEvtWuP5N6V48EHfEtbz48qR8TKZ9",  # Litecoin, of a script
    "DH5yaieqoZN36fDVciNyRueRGvGLR3mr7L",  # Dogecoin
    "A8c3xNz2mqsDLFwv5KL5fpH12QEwDaoTXo",  # Dogecoin, of a script
    "XpESxaUmonkq8RaLLp46Brx2K39ggQe226",  # Dash
    "7gnwGHt17heGpG9Crfeh4KGpYNFugPhJdh",  # Dash, of a script
    "TR7NHqjeKQxGTCi8q8ZY4pL8otSzgjLj6t",  # Tron
)
BECH32 = (
    "bc1qw508d6qejxtdg4y5r3zarvary0c5xw7kv8f3t4", "BC1QW508D6QEJXTDG4Y5R3ZARVARY0C5XW7KV8F3T4",  # BIP-173
    "bc1p0xlxvlhemja6c4dqv22uapctqupfhlxm9h8z3k2e72q4k9hcz7vqzk5jj0",  # BIP-350
    "bc1pw508d6qejxtdg4y5r3zarvary0c5xw7kw508d6qejxtdg4y5r3zarvary0c5xw7kt5nd6y",
    "addr1qx2fxv2umyhttkxyxp8x0dlpdt3k6cwng5pxj3jhsydzer3n0d3vllmyqwsx5wktcd8cc3sq835lu7drv2xwl2wywfgse35a3x",  # CIP-19
)  # fmt: skip
FALSE = (
    "bc1qw508d6qejxtdg4y5r3zarvary0c5xw7kv8f3t5",  # BIP-173's own example of a wrong checksum
    "bc1p0xlxvlhemja6c4dqv22uapctqupfhlxm9h8z3k2e72q4k9hcz7vq5zuyut",  # BIP-350's
    "1A1zP1eP5QGefi2DMPTfTL5SLmv7DivfNb",
    "1BoatSLRHtKNngkdXEeobR76b53LETtpy",  # a character short
    "0x5aAeb6053F3E94C9b9A09f33669435E7Ef1BeAeD",  # one letter in the wrong case
    "0xD1220a0cf47c7B9Be7A2E6BA89F429762e7b9aDb",
    "0x000000000000000000000000000000000000dEaD",  # nobody's
)


def found(text: str) -> list[str]:
    return [text[span.start : span.end] for span in crypto_wallets(text)]


@pytest.mark.parametrize("address", [*ETHEREUM, *BASE58, *BECH32])
def test_a_published_address_is_found_whole(address: str) -> None:
    assert found(f"My wallet is {address}, thanks") == [address]


@pytest.mark.parametrize("address", FALSE)
def test_an_address_with_a_wrong_checksum_is_none(address: str) -> None:
    assert found(f"My wallet is {address}, thanks") == []


@pytest.mark.parametrize("address", [*BASE58, ETHEREUM[0], *ETHEREUM[4:], *BECH32])
def test_one_other_character_breaks_every_checksum(address: str) -> None:
    """But of Ethereum's upper and lower case, which has none."""
    broken = address[:-3] + ("2" if address[-3] != "2" else "3") + address[-2:]
    assert found(f"My wallet is {broken}, thanks") == ([broken] if address == ETHEREUM[0] else [])


@pytest.mark.parametrize("address", ETHEREUM)
def test_without_a_word_for_it_only_a_checksum_makes_a_wallet(address: str) -> None:
    assert found(f"print('{address}')") == ([address] if address in ETHEREUM[4:] else [])


def test_few_kinds_of_characters_are_nobodys_address() -> None:
    """Eight kinds with the x, then nine."""
    assert found(f"My wallet is 0x{'0123456' * 5}01234") == []
    assert found(address := f"My wallet is 0x{'01234567' * 5}") == [address[13:]]
