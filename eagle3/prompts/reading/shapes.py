"""The names of columns and roles: the usual ones, and those in `prompts.fields` and `prompts.roles`.

Case, underscores, hyphens and blanks do not matter: chatHistory is chat_history. A dot leads into a column:
body.messages. If a row fills several columns of one kind, the first name counts; of licences and origins all count.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from json import JSONDecoder
from types import MappingProxyType
from typing import Any

METADATA = ("metadata", "meta")
ORIGINS = ("source", "dataset", "dataset_name", "dataset_id", "data_source", "source_dataset", "origin", "subset")
MODELS = ("model", "models", "model_name", "model_id", "generator", "generated_by", "teacher", "teacher_model")
LICENSES = ("license", "licence", "licenses", "licences", "license_name")


def _with_metadata(*names: str) -> tuple[str, ...]:
    return (*names, *(f"{inside}.{name}" for inside in METADATA for name in names))


def _numbered(*stems: str) -> list[str]:
    """Return the names of columns that hold one option each: option1, option a, …"""
    return [f"{stem}{suffix}" for stem in stems for suffix in "0123456789abcdef"]


CHOICES = (
    "choices", "options", "endings", "answer_choices", "answer_options", *"ABCDEF", "opa", "opb", "opc", "opd", "ope",
    *_numbered("option", "choice", "distractor", "incorrect_answer"),
)  # fmt: skip

FIELDS: dict[str, tuple[str, ...]] = {
    "id": ("id", "conversation_id", "question_id", "custom_id"),
    "license": _with_metadata(*LICENSES),
    "source": _with_metadata(*ORIGINS),  # the first goes with the prompt; none may be of a forbidden source
    "model": _with_metadata(*MODELS),  # that answered: none may be of a forbidden source
    # The conversation is in the first of these three kinds that a row fills.
    "messages": ("messages", "conversations", "conversation", "chat_messages", "body.messages"),
    "turns": ("turns",),  # the user's
    "prompt": (
        "prompt", "instruction", "question", "query", "problem", "inputs", "body.input", "body.prompt", "input", "text",
    ),
    "context": ("input", "context", "passage"),  # the text a prompt is about; follows it after an empty line
    "system": (
        "system", "system_prompt", "system_message", "instructions", "body.instructions", "body.system",
        "system_instruction",  # Gemini's
    ),
    "choices": CHOICES,  # of a multiple-choice question
    "answer": (
        "output", "response", "answer", "completion", "solution", "targets", "canonical_solution", "reference",
        "solutions", "best_answer", "correct_answer", "generation", "generated_text",
    ),
    "role": ("role", "from", "speaker", "sender"),  # of a turn
    "content": ("content", "value", "text", "parts"),  # of a turn; the last Gemini's, OpenTelemetry's and the AI SDK's
    # How an answer ended: OpenAI's, Ollama's, Anthropic's, llama.cpp's and Model-Optimizer's; what a stop string was in
    # SGLang; and SGLang's, TGI's, LangChain's and the Responses API's, each in an object.
    "finish_reason": (
        *_with_metadata("finish_reason", "done_reason", "stop_reason", "stop_type", "truncated"), "matched_stop",
        "meta_info.finish_reason", "details.finish_reason", "response_metadata.finish_reason",
        "incomplete_details.reason",
    ),
    # Variables of the chat template: an object of them, or one under its own name.
    "chat_template_kwargs": (
        "chat_template_kwargs", "body.chat_template_kwargs", "extra_body.chat_template_kwargs",
        "body.extra_body.chat_template_kwargs", "metadata.chat_template_kwargs", "enable_thinking", "reasoning_effort",
        "body.reasoning_effort",
    ),
    # Of a row that holds one turn of a conversation; the second is Slack's, the third LibreChat's.
    "part_of": ("parent_id", "parent_user_id", "parent_message_id"),
    # Without these it would be another prompt: such rows are refused, or keep their tools (prompts.tools=keep).
    "attachments": (
        "history", "chat_history", "conversation_history", "message_history", "dialogue_history", "dialog_history",
        "past_messages", "previous_messages", "previous_turns", "past_user_inputs", "previous_response_id",
        "body.previous_response_id",
        "tools", "functions", "body.tools", "body.functions", "available_tools", "tool_config.tools",
        "image", "images", "video", "videos", "audio", "audios",
        "instances",  # Self-Instruct's inputs of a task
    ),
}  # fmt: skip
CONVERSATION = ("messages", "turns", "prompt")
# Each is compared as `plain_name` returns it. The first names the conversation of one turn, the second its place in it.
TURN_OF = frozenset(("conversationid", "sessionid", "threadid", "chatid"))
TURN_NUMBERS = frozenset((
    "turn", "turnid",
    *(f"{stem}{end}" for stem in ("turn", "message", "utterance") for end in ("index", "idx", "number", "num", "no")),
))  # fmt: skip
OF_TURNS = ("role", "content")
OF_REQUESTS = ("system", "attachments", "chat_template_kwargs", "model")  # what requests have next to their turns
EMPTY = frozenset(("", "[]", "{}", "null"))
OF_TEXT = ("prompt", "context", "system")
# In lower case: pandas and other programs write the first for empty cells, people and Alpaca's successors the last; no
# text of OF_TEXT.
MISSING = frozenset(
    ("nan", "none", "<na>", "nat", "undefined", "[object object]", "#n/a", "\\n", "n/a", "<noinput>", "no input", "-")
)
BETWEEN_WORDS = str.maketrans("", "", "_- ")  # of a name
LONGEST_EMPTY = 40  # characters of a text that may be blank
EACH_ANSWERED = "each_answered"  # a row's column: user turns that follow each other are answered one by one
TWICE = ", given twice"  # follows the name of a key whose value would get lost
UNREAD = object()  # stands for the value of a column that was not read from its file

ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter", "customer", "client", "caller", "visitor", "end-user"), "user"),
    **dict.fromkeys(
        ("assistant", "gpt", "chatgpt", "bing", "bard", "model", "ai", "bot", "chatbot", "agent", "llm"), "assistant"
    ),
    **dict.fromkeys(
        ("tool", "function", "function_response", "function_call_output", "observation", "environment", "ipython",
         "tool_response", "tool_result"),
        "tool",
    ),
    **dict.fromkeys(("function_call", "tool_call"), "call"),
}  # fmt: skip

Wanted = tuple[int, str, str, list[str]]  # rank, kind, name, path inside the column


@dataclass(frozen=True)
class Layout:
    """fields: names by kind, the preferred first; roles: name in lower case → system, user, assistant, call or tool;
    keeps_tools: a row's tools go with its prompt; keeps_history: its answers do, as the history of later turns."""

    fields: Mapping[str, Sequence[str]]
    roles: Mapping[str, str]
    keeps_tools: bool = False
    keeps_history: bool = False

    @cached_property
    def wanted(self) -> dict[str, list[Wanted]]:
        """Return the values to read from each column, by its plain name."""
        wanted: dict[str, list[Wanted]] = {}
        for kind, names in self.fields.items():
            for rank, name in enumerate(names if kind not in OF_TURNS else ()):
                column, *inside = plain_name(name).split(".")
                wanted.setdefault(column, []).append((rank, kind, name, inside))
        return wanted

    def wanted_in(self, column: str) -> Sequence[Wanted]:
        """Return the values to read from a column. Tables that were flattened have dots in their names, too."""
        first, dot, others = plain_name(column).partition(".")
        wanted = self.wanted.get(first, ())
        if not dot:
            return wanted
        rests = [(rank, kind, name, _rest(inside, others)) for rank, kind, name, inside in wanted]
        return [(rank, kind, name, rest) for rank, kind, name, rest in rests if rest is not None]

    def read(self, row: dict | list) -> "Columns":
        """Return the values of a row by kind. A list is the turns of one conversation."""
        if isinstance(row, list):
            return Columns({}, self, {"messages": [("the row", row)]})
        found: dict[str, list[tuple[str, Any]]] = {}
        twice: dict[str, Any] = {}
        columns = [(wanted, column) for column in row for wanted in self.wanted_in(column)]
        for (_, kind, name, inside), column in sorted(columns, key=lambda each: each[0][0]):  # ties in order of the row
            value = _inside(row[column], inside) if inside else row[column]
            if kind == "prompt" and self.is_turns(turns := json_in(value, "[")):
                value = turns
            if not is_empty(value) and not (kind in OF_TEXT and is_missing(value)):
                values = found.setdefault(kind, [])
                if any(other == name and each != value for other, each in values):
                    twice[column] = value
                values.append((name, value))
        return Columns(row, self, found, twice)

    def is_turns(self, value: Any) -> bool:
        """Tell whether a value is a list of turns."""
        return isinstance(value, list) and bool(value) and all(map(self._is_turn, value))

    def is_row(self, value: Any) -> bool:
        """Tell whether a value is a row with a conversation."""
        if not isinstance(value, dict):
            return self.is_turns(value)
        return not self._is_turn(value) and self.read(value).conversation_kind() is not None

    def _is_turn(self, value: Any) -> bool:
        if not isinstance(value, dict):
            return False
        has_both = all(self.of_turn(value, kind) is not None for kind in OF_TURNS)
        if not has_both and "content" in value:  # LangChain's have a type instead of a role
            has_both = self.role_named(value.get("type")) is not None
        return has_both and value.keys().isdisjoint(self.fields["part_of"])

    @property
    def refuses_files(self) -> bool:
        """Whether attachments of any name are refused: not where `prompts.fields.attachments` names its own."""
        return self.fields["attachments"][: len(FIELDS["attachments"])] == FIELDS["attachments"]

    @property
    def grouped_by(self) -> str | None:
        """The column that `prompts.fields.source` names instead of the usual ones; None where it is not set."""
        names = self.fields["source"]
        return None if names == FIELDS["source"] else ", ".join(names)

    def is_of_turn(self, name: str) -> bool:
        """Tell whether a turn's key is looked for."""
        return any(name in self.fields[kind] for kind in (*OF_TURNS, "finish_reason", "attachments"))

    def turn(self, role: str, content: Any) -> dict:
        """Return what a column holds as a turn, under the names that turns have."""
        return {self.fields["role"][0]: role, self.fields["content"][0]: content}

    def role_named(self, name: object) -> str | None:
        return self.roles.get(name.strip().lower()) if isinstance(name, str) else None

    def role_in(self, turn: dict) -> str | None:
        return self.role_named(self.of_turn(turn, "role"))

    def of_turn(self, turn: dict, kind: str) -> Any:
        """Return a turn's first value of a kind, an empty one only if all are; None if it has none."""
        first = None
        for name in self.fields[kind]:
            if (value := turn.get(name)) is not None:
                if not is_empty(value):
                    return value
                first = value if first is None else first
        return first


class Columns:
    """A row and its values by kind, as `shape` reads them: names and values, the preferred first.

    twice: columns whose name another one has, but for case and the like; notes: how the row was read, to be counted.
    """

    def __init__(
        self,
        row: dict,
        shape: Layout,
        found: Mapping[str, Sequence[tuple[str, Any]]],
        twice: Mapping[str, Any] = MappingProxyType({}),
    ):
        self.row, self.shape, self.found, self.twice = row, shape, found, twice
        self.notes: list[tuple[str, str | None]] = []

    def note(self, what: str, name: str | None = None) -> None:
        self.notes.append((what, name))

    def conversation_kind(self) -> str | None:
        return next((kind for kind in CONVERSATION if self.found.get(kind)), None)

    def conversation_column(self) -> str | None:
        kind = self.conversation_kind()
        return None if kind is None else self.name(kind)

    def lists_questions(self) -> bool:
        """Tell whether the conversation is a list of texts, or named as the user's turns: each has an answer."""
        kind = self.conversation_kind()
        turns = None if kind is None else self.first(kind)
        return kind == "turns" or (isinstance(turns, list) and all(isinstance(turn, str) for turn in turns))

    def context(self) -> tuple[str | None, Any]:
        """Return the column with the text that goes with the question, if it has one of its own, and that text."""
        found = ((name, value) for name, value in self.found.get("context", ()) if value != self.first("prompt"))
        return next(found, (None, None))

    def unused(self, but: Collection[str]) -> Iterator[tuple[str, Any]]:
        """Yield the columns of conversations, contexts, system prompts and options that the conversation is not of."""
        used = [self.conversation_column(), self.name("system"), *but]
        if self.conversation_kind() == "prompt" and isinstance(self.first("prompt"), str):
            used.append(self.context()[0])
        others = [each for kind in (*CONVERSATION, "context", "system", "choices") for each in self.found.get(kind, ())]
        yield from {name: value for name, value in others if name not in used}.items()

    def unknown(self) -> Iterator[tuple[str, Any]]:
        """Yield the columns that hold something under none of the names that are looked for, also inside others."""
        yield from self.twice.items()
        for column, value in self.row.items():
            if column != EACH_ANSWERED:
                yield from _unread(column, value, [inside for *_, inside in self.shape.wanted_in(column)])

    def first(self, kind: str) -> Any:
        return next(iter(self.all(kind)), None)

    def name(self, kind: str) -> str | None:
        return next((name for name, _ in self.found.get(kind, ())), None)

    def all(self, kind: str) -> list[Any]:
        return [value for _, value in self.found.get(kind, ())]

    def texts(self, kind: str) -> list[str]:
        """Return the texts of all values of a kind, those in lists too."""
        return [each for each in self.parts(kind) if isinstance(each, str)]

    def parts(self, kind: str) -> list[Any]:
        """Return all values of a kind, and instead of a list its elements."""
        return [each for value in self.all(kind) for each in (value if isinstance(value, list) else [value])]


def build_layout(
    fields: Mapping[str, str | Sequence[str]] | None,
    roles: Mapping[str, str] | None,
    *,
    keeps_tools: bool = False,
    keeps_history: bool = False,
) -> Layout:
    """Return the usual shape with the names of `fields` instead of its own, and with `roles` added.

    If `fields` names a column for the conversation, other kinds of conversations are not looked for. If that is inside
    an object, what stands next to it is read under its usual names.
    """
    given = {kind: [names] if isinstance(names, str) else list(names) for kind, names in (fields or {}).items()}
    others: dict[str, tuple[str, ...]] = (
        dict.fromkeys(CONVERSATION, ()) if any(given.get(kind) for kind in CONVERSATION) else {}
    )
    around = [name.rpartition(".")[0] for name in given.get("messages", ()) if "." in name]
    for kind in OF_REQUESTS if around else ():
        others[kind] = (
            *FIELDS[kind],
            *(f"{path}.{name}" for path in around for name in FIELDS[kind] if "." not in name),
        )
    return Layout(
        {**FIELDS, **others, **given},
        {**ROLES, **{name.lower(): role for name, role in (roles or {}).items()}},
        keeps_tools,
        keeps_history,
    )


def is_empty(value: Any) -> bool:
    """Tell whether a value is empty, also as JSON in a text, or the NaN that pandas writes for it."""
    if isinstance(value, str):  # long ones are not empty
        return len(value) < LONGEST_EMPTY and value.strip() in EMPTY
    if isinstance(value, float):
        return value != value
    return not value and (value is None or isinstance(value, list | dict))


def is_missing(value: Any) -> bool:
    """Tell whether a value is the word for none."""
    return isinstance(value, str) and len(value) < LONGEST_EMPTY and value.strip().lower() in MISSING


@lru_cache(4096)
def plain_name(name: str) -> str:
    """Return the name of a column or key as it is compared: parentMessageId is parent_message_id; _id is not id."""
    return name[:1].lower() + name[1:].lower().translate(BETWEEN_WORDS)


def _unread(name: str, value: Any, paths: list[list[str]]) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a value that no path leads to, by name."""
    if [] in paths or is_empty(value):
        return
    value = json_in(value, "{") if paths else value
    if not paths or not isinstance(value, dict):
        yield name, value
        return
    for key, part in value.items():
        yield from _unread(f"{name}.{key}", part, [rest for path in paths if (rest := _rest(path, key)) is not None])


def _inside(value: Any, path: list[str]) -> Any:
    if not path:
        return value
    value = json_in(value, "{")
    parts = value.items() if isinstance(value, dict) else ()
    rests = ((part, rest) for key, part in parts if (rest := _rest(path, key)) is not None)
    return next((found for part, rest in rests if (found := _inside(part, rest)) is not None), None)


def _rest(path: list[str], key: object) -> list[str] | None:
    """Return what of a path comes after a key, which may have dots in it; None if the path does not lead there."""
    name = plain_name(str(key))
    if path[:1] == [name]:
        return path[1:]
    names = name.split(".") if "." in name else [""]
    return path[len(names) :] if path[: len(names)] == names else None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON; where it has a key twice, the value that Python would drop has a name of its own."""
    found = dict(pairs)
    if len(found) < len(pairs):
        found |= {f"{key}{TWICE}": value for key, value in pairs if value != found[key]}
    return found


read_json = JSONDecoder(object_pairs_hook=_object).decode


def from_json(text: str) -> Any:
    """Return the value of a JSON text; None if it is not JSON."""
    try:
        return read_json(text)
    except (ValueError, RecursionError):
        return None


def json_in(value: Any, beginnings: str | tuple[str, ...] = ("{", "[")) -> Any:
    """Return the value of a text that begins as JSON does, None if it is not JSON; any other value as it is."""
    is_json = isinstance(value, str) and value.lstrip().startswith(beginnings)
    return from_json(value) if is_json else value
