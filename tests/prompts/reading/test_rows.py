"""What a row brings along with its conversation: the variables that its chat template is given."""

from prompt_stage import chat, reasons

OTHERS = "chat_template_kwargs other than texts, numbers, true and false by name"


def test_the_variables_of_a_template_stay_with_their_row(prepare):
    cases: list[tuple[dict, dict | None]] = [
        ({"chat_template_kwargs": {"enable_thinking": False, "budget": 3, "unset": None}},
         {"enable_thinking": False, "budget": 3}),
        ({"chat_template_kwargs": '{"enable_thinking": true}'}, {"enable_thinking": True}),
        ({"body": {"chat_template_kwargs": {"thinking": False}, "reasoning_effort": "low"}},
         {"thinking": False, "reasoning_effort": "low"}),
        ({"enable_thinking": False}, {"enable_thinking": False}),
        ({"chat_template_kwargs": {"enable_thinking": None}}, None),
        ({"chat_template_kwargs": {"thinking": True, "xml_tools": [], "python_tools": None}}, {"thinking": True}),
        ({"chat_template_kwargs": {"persona": "ask 93.184.216.34 for it"}}, {"persona": "ask <IP_ADDRESS> for it"}),
    ]  # fmt: skip
    prepare([chat(f"question {number}", **row) for number, (row, _) in enumerate(cases)])
    assert [prompt.get("chat_template_kwargs") for prompt in prepare.prompts()] == [kept for _, kept in cases]


def test_what_cannot_be_a_variable_of_a_template_is_refused(prepare):
    cases: list[tuple[object, str]] = [
        ({"documents_of": [1]}, OTHERS),
        ({"a-b": 1}, OTHERS),
        ({"limit": float("inf")}, OTHERS),
        ([True], OTHERS),
        ({"tokenize": True}, "chat_template_kwargs with tokenize, which is no variable of a template"),
        ({"persona": "ask anna.berg@web.de"}, "personal data: EMAIL_ADDRESS"),
    ]
    prepare([chat("a"), *(chat("b", chat_template_kwargs=given) for given, _ in cases)])
    assert reasons(prepare) == [reason for _, reason in cases]


def test_the_variables_count_in_an_id_that_is_made_from_the_content(prepare):
    modes = [{}, {"enable_thinking": True}, {"enable_thinking": False}]
    prepare([chat("a", chat_template_kwargs=mode) for mode in modes], duplicates={"exact": False, "near": False})
    assert len({prompt["id"] for prompt in prepare.prompts()}) == 3
