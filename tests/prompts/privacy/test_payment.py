"""Cards, accounts and wallets against numbers that payment firms, registers, specifications and exchanges publish."""

from collections.abc import Callable

import pytest
from stdnum import luhn

from eagle3.prompts.privacy.payment import bank_accounts, credit_cards, crypto_wallets, ibans

CARDS = (
    "4242424242424242", "5555555555554444", "2223003122003222", "378282246310005", "6011111111111117",
    "30569309025904", "36227206271667", "3566002020360505", "6200000000000005", "6759649826438453",
)  # fmt: skip
NO_CARDS = (
    "4242424242424241",  # fails Luhn's test
    "490154203237518",  # an IMEI, which passes it
    "9999999999999995",  # passes it, of no network
)
IBANS = (
    "NO9386011117947", "GB29NWBK60161331926819", "DE89 3704 0044 0532 0130 00", "MT84MALT011000012345MTLCAST001S",
)  # fmt: skip


def found(find: Callable, text: str) -> list[str]:
    return [text[span.start : span.end] for span in find(text)]


@pytest.mark.parametrize("number", CARDS)
def test_a_published_card_is_found(number: str) -> None:
    for text in (number, f"it is {number}."):
        assert found(credit_cards, text) == [number]


@pytest.mark.parametrize("number", NO_CARDS)
def test_other_numbers_are_no_cards_unless_they_are_called_one_and_have_its_check_digit(number: str) -> None:
    assert found(credit_cards, f"it is {number}.") == []
    called = [number] if luhn.is_valid(number.replace(" ", "")) else []
    assert found(credit_cards, f"my card is {number}.") == called


def test_thirteen_digits_are_a_card_only_if_they_are_called_one() -> None:
    assert found(credit_cards, "my card is 4222222222222.") == ["4222222222222"]
    assert found(credit_cards, "it is 4222222222222.") == []


@pytest.mark.parametrize("number", IBANS)
def test_a_published_iban_is_found_whole_and_with_a_wrong_digit_not_at_all(number: str) -> None:
    for text in (number, f"it is {number}, thanks", f"it is {number} a", f"it is {number} or"):
        assert found(ibans, text) == [number]
    wrong = number[:3] + str(9 - int(number[3])) + number[4:]
    assert found(ibans, f"it is {wrong}, thanks") == []


def test_an_account_of_twenty_digits_is_a_spanish_one_with_its_check_digits() -> None:
    assert found(bank_accounts, "cuenta 12341234161234567890") == ["12341234161234567890"]
    assert found(bank_accounts, "cuenta 12341234171234567890") == []
    assert found(bank_accounts, "cuenta 1234123417123456789") == ["1234123417123456789"]


# Wallets

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


@pytest.mark.parametrize("address", [*ETHEREUM, *BASE58, *BECH32])
def test_a_published_address_is_found_whole(address: str) -> None:
    assert found(crypto_wallets, f"My wallet is {address}, thanks") == [address]


@pytest.mark.parametrize("address", FALSE)
def test_an_address_with_a_wrong_checksum_is_none(address: str) -> None:
    assert found(crypto_wallets, f"My wallet is {address}, thanks") == []


@pytest.mark.parametrize("address", [*BASE58, ETHEREUM[0], *ETHEREUM[4:], *BECH32])
def test_one_other_character_breaks_every_checksum(address: str) -> None:
    """But of Ethereum's upper and lower case, which has none."""
    broken = address[:-3] + ("2" if address[-3] != "2" else "3") + address[-2:]
    assert found(crypto_wallets, f"My wallet is {broken}, thanks") == ([broken] if address == ETHEREUM[0] else [])


@pytest.mark.parametrize("address", ETHEREUM)
def test_without_a_word_for_it_only_a_checksum_makes_a_wallet(address: str) -> None:
    assert found(crypto_wallets, f"print('{address}')") == ([address] if address in ETHEREUM[4:] else [])


def test_few_kinds_of_characters_are_nobodys_address() -> None:
    """Eight kinds with the x, then nine."""
    assert found(crypto_wallets, f"My wallet is 0x{'0123456' * 5}01234") == []
    assert found(crypto_wallets, address := f"My wallet is 0x{'01234567' * 5}") == [address[13:]]
