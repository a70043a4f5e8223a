"""National ids of many countries: the examples of python-stdnum's own documentation, by the names that people use."""

import pytest

from eagle3.prompts.privacy.ids import PERSONAL, modules, national_ids

NUMBERS = [
    ("numer PESEL: 44051401359", "44051401359"),
    ("Mein Bruder hat die AHV-Nummer 756.9217.0769.85", "756.9217.0769.85"),
    ("mitt personnummer är 880320-0016", "880320-0016"),
    ("henkilötunnus 131052-308T", "131052-308T"),
    ("CURP BOXW310820HNERXN09", "BOXW310820HNERXN09"),
    ("my SIN: 123-456-782", "123-456-782"),
    ("OIB 33392005961", "33392005961"),
    ("national id number 44051401359", "44051401359"),
    ("身份证号码: 360426199101010071", "360426199101010071"),
]


@pytest.mark.parametrize(("text", "number"), NUMBERS)
def test_a_number_behind_its_name_is_found(text: str, number: str) -> None:
    assert [text[span.start : span.end] for span in national_ids(text)] == [number]


@pytest.mark.parametrize(("text", "number"), NUMBERS)
def test_a_number_without_its_name_and_a_name_without_a_valid_number_pass(text: str, number: str) -> None:
    for other in (f"order {number} came", text.replace(number, ""), text.replace(number, "12345")):
        assert list(national_ids(other)) == []


def test_a_chinese_number_of_a_county_that_the_library_lacks_is_found() -> None:
    """python-stdnum raises KeyError there."""
    assert len(list(national_ids("身份证号码: 110007198803200011"))) == 1


@pytest.mark.parametrize("number", ["470312-2881820", "ZZ 66 20 82 T", "420602197607100864", "914-48-5809"])
def test_what_somebody_calls_theirs_needs_no_check_digits(number: str) -> None:
    """Numbers as Faker writes them for Korea, the United Kingdom, China and India."""
    for text in (f"Here's my SSN: {number}", f"His social security number is {number}, he said"):
        [span] = national_ids(text)
        assert text[span.start : span.end] == number
    assert list(national_ids(f"a form for the SSN, order {number}")) == []


def test_the_library_has_every_country_of_the_list() -> None:
    assert len(modules()) == len(PERSONAL)
