"""One raw row → chat messages. Keeps user and system turns, and with `prompts.tools=keep` the calls of tools and their
results; drops answers, or keeps them unchanged, or only their text, as the history of later turns.
"""

import re
from typing import Any

from eagle3.prompts.reading.answers import MADE, NOT_TRAINED, ends_stated, read_answer_facts, require_answered
from eagle3.prompts.reading.choices import Options, read_options
from eagle3.prompts.reading.content import content_text, is_none, require_text
from eagle3.prompts.reading.media import has_placeholder, is_file
from eagle3.prompts.reading.order import require_in_order
from eagle3.prompts.reading.prompt import Refused
from eagle3.prompts.reading.rendered import RENDERED, is_rendered
from eagle3.prompts.reading.shapes import (
    CONVERSATION,
    EACH_ANSWERED,
    TURN_NUMBERS,
    TURN_OF,
    Columns,
    Layout,
    from_json,
    is_empty,
    plain_name,
)
from eagle3.prompts.reading.tools import (
    CALL_KEYS,
    OF_A_RESULT,
    Turn,
    are_definitions,
    holds_tools,
    with_tool_turns,
)
from eagle3.prompts.reading.turns import as_turns, find_branch, require_nowhere_else

# A turn with any of these has more than its content: without them an answer is not what the model wrote.
REASONING = ("reasoning_content", "reasoning", "thinking")
PARTS_BESIDE_CONTENT = (*CALL_KEYS, *REASONING)

REASONED = "reasoning"  # the type of an item of the Responses API, which belongs to an answer

KNOWN_OF_TURN = frozenset(("type", "status", *PARTS_BESIDE_CONTENT, *MADE, *NOT_TRAINED))
UNREAD_COLUMN, UNREAD_KEY = "column not read", "key of turns not read"

BETWEEN_MESSAGES = "\n\n"

# Of a help desk's first turn. Data sets that were split also begin with a turn of the assistant, out of its context.
GREETING = re.compile(
    r"^\W*(?:hi|hello|hey|hiya|greetings|welcome|good (?:morning|afternoon|evening|day)|thank(?:s| you) for"
    r"|hallo|guten (?:tag|morgen|abend)|willkommen|moin|bonjour|bonsoir|salut|bienvenue|hola|buen[oa]s|bienvenid"
    r"|ciao|buongiorno|salve|ol[áa]|bom dia|boa tarde|hoi|goedemorgen|hej|cześć|dzień dobry|merhaba"
    r"|привет|здравствуйте|добрый)\b"
    r"|^\W*(?:你好|您好|欢迎|こんにちは|안녕|नमस्ते|مرحبا|السلام)"
    r"|(?:can|may|could) I (?:help|assist)|how (?:can|may) (?:I|we) (?:help|assist)",
    re.IGNORECASE,
)
LONGEST_GREETING = 200  # characters
LONG_CONTEXT = 80  # characters: a shorter one may be in a question by chance

# Columns that say who wrote a row's `text`, next to those of a turn's role: Rasa's and many bots'.
SPEAKERS_OF_TEXTS = ("event", "type", "author")

# Columns of a row whose `text` answers a question in another file, as FastChat and those after it have them.
OF_ANSWERS = frozenset(("answerid", "reviewid", "responseid", "completionid"))

# A list of turns that was written with str() instead of json.dumps, as exports by pandas do.
PYTHON_TURNS = re.compile(
    r"\s*(?:array\()?\[\s*(?:\{\s*'(?:role|content|from|value)'\s*:|(?:Human|AI|System|Chat)Message\()"
)

FILES = ("attachments", "files")  # of a turn, such as documents: ChatGPT's, Claude's

OF_SPECULATORS = ("input_ids", "loss_mask")  # with the rendered text, but without a conversation


def conversation(columns: Columns, *, keep_answers: bool) -> list[dict[str, Any]]:
    """Return [{role, content}], ending with what the target answers, or with an answer if `keep_answers`.

    Raises Refused. Calls are assistant turns with `tool_calls`, and their results turns of the role `tool`.
    """
    shape = columns.shape
    column = columns.conversation_column()
    for name, _ in columns.found.get("attachments", ()):
        is_kept = shape.keeps_tools and holds_tools(name)
        if column not in (None, name) and not is_kept:  # prompts.fields may name one of these columns
            raise Refused(f"row with {name}")
    if column in (None, "text") and columns.row.keys() >= {*OF_SPECULATORS}:
        raise Refused("row of token ids, as speculators regenerate them: docs/how-to/moving.md has a script for them")
    turns = [(_role(turn, shape), turn) for turn in _turns(columns) if keep_answers or turn.get("type") != REASONED]
    require_in_order(turns)
    turns = _with_columns(turns, columns)
    roles = "".join(role[0] for role, _ in turns)
    if re.fullmatch("[su]*us+u[su]*", roles):  # some data sets call the answering side so
        columns.note("system turns between questions without answers")
    if shape.keeps_tools:
        turns = with_tool_turns(turns, columns, keep_answers=keep_answers)
    elif any(role in ("call", "tool") for role, _ in turns):
        raise Refused("tool turn")
    if keep_answers:
        require_answered(turns, columns)
    last = ("assistant", "call") if keep_answers else ("user", "tool")
    after = None
    while turns and turns[-1][0] not in last:
        after = turns.pop()
    if turns and after and after[0] == "system" and not (keep_answers or is_none(shape.of_turn(after[1], "content"))):
        columns.note("system turn after the last question left out")
    if keep_answers and not turns:
        raise Refused("no assistant turn")
    reasons = columns.all("finish_reason")  # of the last answer
    if keep_answers and reasons and not ends_stated(turns[-1][1], shape):
        turns[-1] = (turns[-1][0], {**turns[-1][1], shape.fields["finish_reason"][0]: reasons})
    if not keep_answers:
        turns = _from_first_question(turns, columns)
    messages = _messages(turns, columns, keep_answers=keep_answers)
    if "user" not in [message["role"] for message in messages]:
        raise Refused("no user turn")
    options = _add_options(messages, columns)
    is_document = column == "text"
    for message in messages:
        if message["role"] != "assistant" and is_rendered(message["content"], is_document=is_document):
            raise Refused(RENDERED)
    _note_unread(columns, messages, options)
    return messages


def _from_first_question(turns: list[Turn], columns: Columns) -> list[Turn]:
    """Leave out a greeting before the first question. Any other answer there is to a question that the row lacks."""
    opening = [index for index, (role, _) in enumerate(turns) if role != "system"][:1]
    if not opening or turns[opening[0]][0] not in ("assistant", "call"):
        return turns
    content = columns.shape.of_turn(turns[opening[0]][1], "content")
    if not (isinstance(content, str) and len(content) <= LONGEST_GREETING and GREETING.search(content)):
        raise Refused("conversation that begins with an answer")
    columns.note("greeting before the first question left out")
    del turns[opening[0]]
    return _from_first_question(turns, columns)


def _messages(turns: list[Turn], columns: Columns, *, keep_answers: bool) -> list[dict[str, Any]]:
    """Return the messages; user turns that follow each other become one, as their only answer is to all of them."""
    is_joined = not keep_answers and columns.row.get(EACH_ANSWERED) is not True and not columns.lists_questions()
    messages: list[dict[str, Any]] = []
    before = None
    for role, turn in turns:
        # Many exports write a blank system turn, or "None", for none; a template would still render its header.
        if role == "system" and is_none(columns.shape.of_turn(turn, "content")):
            continue
        if role != "assistant" or keep_answers:
            message = _message(role, turn, columns)
            if role == before == "user" and is_joined:
                messages[-1]["content"] += BETWEEN_MESSAGES + message["content"]
                columns.note("user turns that follow each other joined")
            else:
                messages.append(message)
        elif columns.shape.keeps_history and (text := _given_text(columns.shape.of_turn(turn, "content"), columns)):
            messages.append({"role": "assistant", "content": text})
        before = role
    return messages


def _given_text(content: Any, columns: Columns) -> str | None:
    """Return the text of an answer, as a chat sends it with later turns; None if it has none."""
    try:
        return content_text(content, columns)
    except Refused:
        return None


def _add_options(messages: list[dict[str, Any]], columns: Columns) -> Options | None:
    """Add the options of a multiple-choice question to it, unless it holds them."""
    options = read_options(columns)
    questions = [message for message in messages if message["role"] == "user"]
    if options is None or any(options.are_in(question["content"]) for question in questions):
        return options
    if len(questions) > 1:
        raise Refused(f"conversation with {options.columns[0]}")
    questions[0]["content"] += BETWEEN_MESSAGES + content_text("\n".join(options.lines), columns)
    columns.note("options added to the question")
    return options


def _note_unread(columns: Columns, messages: list[dict[str, Any]], options: Options | None) -> None:
    """Note what stands next to the conversation and is not read; refuse a file that the question would be about."""
    known = columns.unused(but=options.columns if options else ())
    for name, value in [*known, *columns.unknown()]:
        if name == columns.conversation_column():  # a tree of any name
            continue
        if columns.shape.refuses_files and is_file(name, value):
            raise Refused("row with a file of image, sound or video", name=name)
        if columns.shape.refuses_files and name in columns.row and are_definitions(value):
            raise Refused("row with tools under another name than tools", name=name)
        if not (isinstance(value, str) and any(value.strip() == message["content"] for message in messages)):
            columns.note(UNREAD_COLUMN, name)
    asked = [message["content"] for message in messages if message["role"] == "user"]
    if columns.shape.refuses_files and any(map(has_placeholder, asked)):
        raise Refused("text with the place of an image, sound or video")


def _turns(columns: Columns) -> list[dict]:
    kind, name = columns.conversation_kind(), columns.conversation_column()
    if kind is None or name is None:  # the columns have other names, or they are empty
        if (branch := find_branch(columns)) is not None:
            return branch
        require_nowhere_else(columns.row, columns.shape)
        if any(columns.shape.is_turns([each]) for each in (columns.row, *columns.row.values())):
            raise Refused("one turn of a conversation")
        wanted = [each for column in columns.row for each in columns.shape.wanted_in(column)]
        found = any(kind in CONVERSATION and not inside for _, kind, _, inside in wanted)
        raise Refused("no user turn" if found else "no column of messages or prompts")
    turns = columns.first(kind)
    if isinstance(turns, str) and PYTHON_TURNS.match(turns):
        raise Refused("turns as Python writes them, not JSON: write the column with json.dumps")
    while isinstance(turns, str) and kind != "prompt":
        turns = from_json(turns)
    turns = as_turns(turns, columns.shape)
    if not isinstance(turns, list):
        require_nowhere_else({name: turns}, columns.shape)
    if isinstance(turns, str):
        return _of_prompt(turns, columns)
    if not isinstance(turns, list):
        raise Refused(f"{name} is not a list" if kind != "prompt" else f"{name} is neither text nor a list")
    if kind == "prompt" and len(turns) > 1 and columns.lists_questions():
        columns.note("list of texts, each of them asked", name)
    if kind != "messages":
        turns = [columns.shape.turn("user", turn) if isinstance(turn, str) else turn for turn in turns]
    if kind == "turns":  # Arena-Hard's are objects around texts
        turns = [
            columns.shape.turn("user", turn["content"]) if isinstance(turn, dict) and [*turn] == ["content"] else turn
            for turn in turns
        ]
    for turn in turns:
        if not isinstance(turn, dict):
            raise Refused(f"{name} holds something other than turns")
    return turns


def _of_prompt(text: str, columns: Columns) -> list[dict]:
    """Return the turns of a row that has one question in a column, with its context."""
    if _is_one_turn(columns):
        raise Refused("one turn of a conversation")
    if columns.conversation_column() == "text" and not OF_ANSWERS.isdisjoint(map(plain_name, columns.row)):
        raise Refused("text of an answer, not of a question")
    context_column, context = columns.context()
    if context is not None and not isinstance(context, str):
        raise Refused("context is not text")
    parts = [each for each in columns.all("prompt") if isinstance(each, str) and each not in (text, context)]
    is_part = len(context or "") >= LONG_CONTEXT or any(each in text for each in parts)
    if context and context in text and is_part:
        context = None  # the text was made of it
    if context:
        columns.note("added to the question", context_column)
    for column, value in columns.row.items():
        if plain_name(column) in TURN_OF and not is_empty(value):
            columns.note("question without earlier ones of its conversation, if there are any", column)
    return [columns.shape.turn("user", f"{text}\n\n{context}" if context else text)]


def _is_one_turn(columns: Columns) -> bool:
    """Tell whether a row with one text is a turn of a conversation whose other turns are rows of their own."""
    role = columns.shape.role_in(columns.row)
    if columns.name("part_of") or role not in (None, "user") or columns.row.get("type") == "message":  # Slack's
        return True
    if columns.conversation_column() == "text":
        speakers = [value for column, value in columns.row.items() if plain_name(column) in SPEAKERS_OF_TEXTS]
        if any(columns.shape.role_named(each) in ("user", "assistant") for each in speakers):
            return True
    if not TURN_NUMBERS.isdisjoint(map(plain_name, columns.row)):
        return True
    # The first turn of a tree has a column for the parent, without a value.
    is_first = any(kind == "part_of" for column in columns.row for _, kind, *_ in columns.shape.wanted_in(column))
    return role is not None and not is_first


def _with_columns(turns: list[Turn], columns: Columns) -> list[Turn]:
    """Add the system turn and the answer from columns of their own, if the turns have none."""
    system, answer = columns.first("system"), columns.first("answer")
    in_turns = [columns.shape.of_turn(turn, "content") for role, turn in turns if role == "system"]
    in_turns = [content for content in in_turns if not is_none(content)]
    if system is not None and in_turns and [system] != in_turns:
        raise Refused("another system prompt in a column than in the turns")
    if system is not None and not in_turns:
        turns = [("system", columns.shape.turn("system", system)), *turns]
    answers: list[Turn] = []
    if isinstance(answer, str) and turns and turns[-1][0] == "user":
        answers = [("assistant", columns.shape.turn("assistant", answer))]
    if isinstance(answer, list) and all(isinstance(turn, dict) for turn in answer):  # TRL's `completion`
        named = [columns.shape.of_turn(turn, "role") or turn.get("type") for turn in answer]
        if any(columns.shape.role_named(name) for name in named):  # else they are answers with keys of their own
            answers = [(_role(turn, columns.shape), turn) for turn in answer]
    # What comes before an answer of its own column is its prompt, which another model may have answered.
    return [
        (role, {**turn, "train": False} if answers and role == "assistant" else turn) for role, turn in turns
    ] + answers


def _role(turn: dict, shape: Layout) -> str:
    """Return whose turn it is. Items of the Responses API, such as calls, have a type instead."""
    named = shape.of_turn(turn, "role") or turn.get("type")
    if (role := shape.role_named(named)) is not None:
        return role
    is_kind = shape.of_turn(turn, "role") is None and shape.of_turn(turn, "content") is not None
    if named is None or is_kind or isinstance(named, dict | list):  # a type that is no role, as Discord's and Teams'
        raise Refused("turn without a role")
    raise Refused("unknown role", name=named if isinstance(named, str) else None)


def _message(role: str, turn: dict, columns: Columns) -> dict[str, Any]:
    shape = columns.shape
    for part in REASONING if role == "call" else PARTS_BESIDE_CONTENT:
        if turn.get(part) and not is_empty(turn[part]):
            way_out = ": docs/how-to/moving.md has a script that joins them" if part in REASONING else ""
            raise Refused(f"turn with {part} next to its content{way_out}")
    # Ollama's messages have `images`.
    for name in (*shape.fields["attachments"], *(FILES if shape.refuses_files else ())):
        if not is_empty(turn.get(name)):
            raise Refused(f"turn with {name}")
    for name, value in turn.items():
        known = name in KNOWN_OF_TURN or (role == "tool" and name in OF_A_RESULT)
        if not known and not shape.is_of_turn(name) and not is_empty(value):
            if shape.refuses_files and is_file(name, value):
                raise Refused("turn with a file of image, sound or video", name=name)
            columns.note(UNREAD_KEY, name)
    content = shape.of_turn(turn, "content")
    text = content_text("" if role == "call" and content is None else content, columns)
    for name in shape.fields["content"]:
        other = turn.get(name)
        if other is not content and not is_empty(other) and (_given_text(other, columns) or "").split() != text.split():
            columns.note(UNREAD_KEY, name)
    if role in ("user", "system"):
        require_text(role, text, columns)
    message = {"role": role, "content": text}
    if role == "call":
        return {**message, "role": "assistant", "tool_calls": turn["tool_calls"], **read_answer_facts(turn, shape)}
    if role == "tool":
        return message | {key: turn[key] for key in ("tool_call_id", "name") if key in turn}
    if role != "assistant":
        return message
    made = read_answer_facts(turn, shape)
    if isinstance(content, list) and len(content) > 1 and "output_ids" not in made:
        raise Refused("answer in several parts: write it as one text, as the target wrote it")
    return message | made
