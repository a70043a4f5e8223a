"""Cards and accounts against numbers that payment firms and registers publish."""

from collections.abc import Callable

import pytest
from stdnum import luhn

from eagle3.prompts.privacy.payment import bank_accounts, credit_cards, ibans

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
