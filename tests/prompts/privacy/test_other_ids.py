"""National ids of many countries: the examples of python-stdnum's own documentation, by the names that people use."""

import pytest

from eagle3.prompts.privacy.other_ids import PERSONAL, OtherNationalId, modules

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
    assert [text[span.start : span.end] for span in OtherNationalId(action="drop").find(text)] == [number]


@pytest.mark.parametrize(("text", "number"), NUMBERS)
def test_a_number_without_its_name_and_a_name_without_a_valid_number_pass(text: str, number: str) -> None:
    for other in (f"order {number} came", text.replace(number, ""), text.replace(number, "12345")):
        assert list(OtherNationalId(action="drop").find(other)) == []


def test_the_library_has_every_country_of_the_list() -> None:
    assert len(modules()) == len(PERSONAL)
