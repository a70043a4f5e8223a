"""How far words may be from the number that they name, to the character."""

import pytest

from eagle3.prompts.privacy.recogniser import Span, has_context, words

NUMBER = "123456789"
SSN = words("ssn")


@pytest.mark.parametrize(
    ("text", "near"),
    [
        # A word counts up to 80 characters before the number, and up to 40 after it.
        (f"x\nssn {NUMBER}", True),
        (f"x\nssn{' ' * 77}{NUMBER}", True),
        (f"x\nssn{' ' * 78}{NUMBER}", False),
        (f"{NUMBER} ssn", True),
        (f"{NUMBER}{' ' * 37}ssn", True),
        (f"{NUMBER}{' ' * 38}ssn", False),
        # The first line of a table counts up to 4000 characters before; 200 of its characters are read.
        (f"ssn\n{'.' * 3995}\n{NUMBER}", True),
        (f"ssn\n{'.' * 3996}\n{NUMBER}", False),
        (f"{'x' * 196} ssn\n{'.' * 100}\n{NUMBER}", True),
        (f"{'x' * 197} ssn\n{'.' * 100}\n{NUMBER}", False),
        # A table begins after the last blank line, and its head is one line.
        (f"name\n\nssn\n{'.' * 100}\n{NUMBER}", True),
        (f"ssn\n\nname\n{'.' * 100}\n{NUMBER}", False),
        (f"name\nssn\n{'.' * 100}\n{NUMBER}", False),
        (f"ssn\n\n{NUMBER}", True),
        # The name of another number right before it wins.
        (f"my ssn and {NUMBER}", True),
        (f"my ssn and order number {NUMBER}", False),
    ],
)
def test_a_word_names_a_number_only_from_so_far(text: str, near: bool) -> None:
    start = text.index(NUMBER)
    assert (has_context(text, Span(start, start + len(NUMBER)), SSN)) is near
