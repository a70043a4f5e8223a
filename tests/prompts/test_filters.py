"""Length and language: what passes, what is refused, and that code is never a foreign language."""

import inspect
import json

import pytest
from omegaconf import OmegaConf
from stores import CONF

from eagle3.errors import InputError
from eagle3.prompts.filters import READ_CHARACTERS, UNKNOWN, LanguageCheck, LengthCheck, detect_language, split_code
from eagle3.prompts.reading.prompt import Prompt

DEFAULTS = OmegaConf.to_container(OmegaConf.load(CONF / "prompts/filters/default.yaml"))

SENTENCES = {
    "en": "Could you explain how a refund works when the parcel arrives late?",
    "de": "Kannst du mir erklären, wie die Erstattung funktioniert, wenn das Paket zu spät kommt?",
    "fr": "Pouvez-vous m'expliquer comment obtenir un remboursement si le colis arrive en retard ?",
    "es": "¿Puedes explicarme cómo funciona el reembolso cuando el paquete llega tarde?",
    "ru": "Можешь объяснить, как вернуть деньги, если посылка пришла поздно?",
    "ar": "هل يمكنك أن تشرح لي كيف يتم استرداد المال عندما يصل الطرد متأخرا؟",
    "zh": "如果包裹迟到了,怎样才能申请退款?请解释一下。",
    "ja": "荷物が遅れて届いたとき、返金はどのように行われますか?",
}
CODE = {
    "python": inspect.getsource(json.dumps),
    "fenced": "```\nhet pakket komt te laat aan bij de klant\nniemand weet waarom\n```",
    "open fence": "~~~sh\nhet pakket komt te laat aan bij de klant",
    "c": '#include <stdio.h>\nint main(void) {\n    printf("hoi");\n    return 0;\n}',
    "javascript": "const total = rows.map((row) => row.price);\nexport default total;",
    "json": '{\n  "naam": "pakket",\n  "prijs": 3\n}',
    "sql": "SELECT name FROM parcels\nWHERE late = 1\nORDER BY name",
    "shell": "$ ls -l\n$ cat parcels.txt",
    "html": "<ul>\n<li>pakket</li>\n</ul>",
}


def prompt(*texts: str, system: str | None = None) -> Prompt:
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)]
    first = [{"role": "system", "content": system}] if system else []
    return Prompt(id="1", source="a", license="MIT", messages=[*first, *messages])


def language(**config) -> LanguageCheck:
    return LanguageCheck(**{**DEFAULTS["language"], **config})


# Length


@pytest.mark.parametrize(
    ("bounds", "reason"),
    [
        ({}, None),
        ({"min_characters": 12, "max_characters": 12, "min_turns": 2, "max_turns": 2}, None),
        ({"min_characters": 13}, "fewer than 13 characters"),
        ({"max_characters": 11}, "more than 11 characters"),
        ({"min_turns": 3}, "fewer than 3 turns"),
        ({"max_turns": 1}, "more than 1 turns"),
        ({"max_characters": 1, "max_turns": 1}, "more than 1 characters"),
        ({"max_characters": 0}, "more than 0 characters"),
    ],
)
def test_length_counts_characters_of_system_and_user_turns_but_not_of_the_answers(bounds, reason):
    check = LengthCheck(**{**DEFAULTS["length"], **bounds})
    assert check(prompt("12包裹5", "an answer", "678", system="abcd")).reason == reason


# Language


def test_one_sentence_is_enough_to_tell_its_language():
    for code, sentence in SENTENCES.items():
        assert detect_language(sentence) == code
        assert language(allowed=None, unknown="refuse")(prompt(sentence)).reason is None
        assert split_code([sentence]).code_share == 0


def test_code_is_no_foreign_language():
    check = language(allowed=["en"])
    for name, code in CODE.items():
        assert check(prompt(code)).reason is None, name
        assert check(prompt(f"{SENTENCES['en']}\n\n{code}")).reason is None, name
        assert check(prompt(f"{SENTENCES['de']}\n\n{code}")).reason == "language not allowed: de", name
        assert split_code([code]).code_share > 0.9, name


def test_prose_is_no_code():
    poem = (
        "for the rain;\nif it comes, return to me.\nLet us go then, you and I\n- milk\n- eggs\n1. import duties apply"
    )
    assert split_code([poem]).code_share == 0


def test_what_says_too_little_is_unknown_and_kept_or_refused_by_config():
    for text in ("", " \n", "ok", "42", "https://example.com/een/pakket", "`rm -rf pakket`", "?!"):
        assert detect_language(split_code([text]).prose) == UNKNOWN
        assert language(allowed=["en"])(prompt(text)).reason is None
        assert language(allowed=["en"], unknown="refuse")(prompt(text)).reason == "language unknown"


def test_inline_code_and_paths_do_not_speak_for_a_language():
    words = "het pakket komt te laat aan bij de klant"
    for text in (f"`{words}`", words.replace(" ", "_"), words.replace(" ", "/")):
        assert detect_language(text) == UNKNOWN
        assert detect_language(f"{SENTENCES['en']} {text}") == "en"


def test_only_the_beginning_of_the_users_prose_counts_not_the_system_prompt_or_the_answers():
    assert detect_language((SENTENCES["en"] * 9)[:READ_CHARACTERS] + SENTENCES["de"] * 99) == "en"
    mixed = prompt(SENTENCES["de"], SENTENCES["en"], SENTENCES["de"], system=SENTENCES["en"])
    assert language(allowed=["en"])(mixed).reason == "language not allowed: de"


def test_an_unknown_code_names_the_key():
    with pytest.raises(InputError, match=r"prompts\.language\.allowed has 'klingon', which is none of the ISO 639"):
        language(allowed=["en", "klingon"])
