"""How far words may be from the number that they name, to the character."""

import pytest

from eagle3.prompts.privacy.recogniser import Span, has_context, words

NUMBER = "123456789"
SSN = words("ssn")


def named(text: str) -> bool:
    start = text.index(NUMBER)
    return has_context(text, Span(start, start + len(NUMBER)), SSN)


@pytest.mark.parametrize(("blanks", "near"), [(1, True), (77, True), (78, False)])
def test_a_word_counts_up_to_80_characters_before(blanks: int, near: bool) -> None:
    assert named(f"x\nssn{' ' * blanks}{NUMBER}") is near


@pytest.mark.parametrize(("blanks", "near"), [(1, True), (37, True), (38, False)])
def test_a_word_counts_up_to_40_characters_behind(blanks: int, near: bool) -> None:
    assert named(f"{NUMBER}{' ' * blanks}ssn") is near


@pytest.mark.parametrize(("length", "near"), [(4000, True), (4001, False)])
def test_the_head_of_a_table_counts_up_to_4000_characters_before(length: int, near: bool) -> None:
    head = "ssn\n"
    assert named(head + "." * (length - len(head) - 1) + "\n" + NUMBER) is near


@pytest.mark.parametrize(("length", "near"), [(196, True), (197, False)])
def test_200_characters_of_a_tables_head_are_read(length: int, near: bool) -> None:
    assert named("x" * length + " ssn\n" + "." * 100 + "\n" + NUMBER) is near


@pytest.mark.parametrize(("head", "near"), [("name\n\nssn\n", True), ("ssn\n\nname\n", False), ("name\nssn\n", False)])
def test_a_table_begins_behind_the_last_blank_line_and_its_head_is_one_line(head: str, near: bool) -> None:
    assert named(head + "." * 100 + "\n" + NUMBER) is near


def test_a_word_that_begins_the_text_counts_over_a_blank_line() -> None:
    assert named(f"ssn\n\n{NUMBER}")


def test_the_name_of_another_number_right_before_it_wins() -> None:
    assert named(f"my ssn and {NUMBER}") and not named(f"my ssn and order number {NUMBER}")
