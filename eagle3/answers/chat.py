"""Chat template → token ids: the prompt that a server would build, and the content that it would return."""

import copy
import datetime
import json
import logging
import re
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from eagle3.adapters.transformers import added_ids, control_ids
from eagle3.answers.reasoning import find_reasoning
from eagle3.answers.template_limits import ANOTHER, TemplateFailed, Unbounded, renderer
from eagle3.errors import InputError
from eagle3.settings.precomputing import ChatSettings
from eagle3.storage.files import require_regular
from eagle3.target.identity import template_hash

log = logging.getLogger(__name__)

LOSES_TOOLS = "the chat template does not render the tools of the conversation"
LOSES_TEXT = "the chat template does not render the whole text of a system or user turn"
NOT_WHOLE = "the template drops, adds or moves part of the answer"
SENTINEL = "Sentinel0451"  # no template changes, cuts or takes it for anything
QUESTION = {"role": "user", "content": "Question0451"}

Messages = list[dict[str, Any]]
Items = TypeVar("Items", str, list[int])


class RefusedConversation(Exception):
    """The template refuses this conversation. The message never holds text of the conversation."""


class NoEmbedding(RefusedConversation):
    """A conversation holds a token that the target has no embedding for."""


class Chat:
    """The target's chat format, with the clock pinned to `date`."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        settings: ChatSettings,
        *,
        stop_ids: Iterable[int],
        rows: int | None = None,
    ) -> None:
        """`rows` are those of the target's embedding: some tokenizers have tokens beyond them."""
        self.tokenizer = tokenizer
        self.rows = rows
        self.control_ids, self._added_ids = control_ids(tokenizer), added_ids(tokenizer)
        source, self._template, self._variables = _template_and_variables(tokenizer, settings)
        self.reasoning = find_reasoning(settings.reasoning_parser, source)
        self.settings: dict[str, Any] = {
            "template_hash": template_hash(source),
            "template_kwargs": dict(settings.template_kwargs),
            "date": settings.date,
            "reasoning_parser": settings.reasoning_parser,
        }
        self._source, self._special_tokens = source, tokenizer.special_tokens_map
        self._words = frozenset(re.findall(r"\w+", source))
        read = sorted(self._words & self._special_tokens.keys())
        self.settings["special_tokens"] = {name: str(self._special_tokens[name]) for name in read}
        self.reads_clock = "strftime_now" in source
        self._offered: dict[str, Any] = {}  # to the template, in addition to the conversation: its tools
        self._in_parts = False  # whether a message's content is a list of parts, which some templates want
        self._tell_unread("chat.template_kwargs", settings.template_kwargs)
        self._check_template()
        self.stop_ids = frozenset(stop_ids)
        self.settings["target_stop_ids"] = sorted(self.stop_ids)
        self._warn_of_plain_stops()
        self._warn_of_missing_generation_prompt()
        if added := self._added_stop_ids(settings.stop_tokens):
            self.stop_ids |= added
            self.settings["stop_tokens"] = sorted(map(self.token_text, added))

    def for_prompt(self, prompt: Mapping[str, Any]) -> "Chat":
        """Return the same format with the tools of a prompt and its own variables of the template."""
        chat = self.with_tools(prompt.get("tools"))
        if own := prompt.get("chat_template_kwargs"):
            self._tell_unread("chat_template_kwargs of prompts", own)
            chat._variables = self._variables | own
        return chat

    def with_tools(self, tools: list[dict[str, Any]] | None) -> "Chat":
        """Return the same format for a conversation that offers these tools."""
        chat = copy.copy(self)
        chat._offered = {"tools": tools} if tools else {}
        return chat

    def _tell_unread(self, setting: str, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._words:
                _log_once(f"{setting}: {name} has no effect, because the chat template does not read it")

    def prompt_ids(self, messages: Messages) -> list[int]:
        """Token ids up to where generation begins. Raises `RefusedConversation` when the template does."""
        return self.encode(self.prompt(messages))

    def prompt(self, messages: Messages) -> str:
        """Render up to where generation begins. Raises `RefusedConversation`, also when text of a turn is lost."""
        text = self.render(messages, add_generation_prompt=True)
        asked = ((each["content"].strip(), each["role"]) for each in messages if each["role"] != "assistant")
        # Some templates write results as JSON.
        if not all(each in text or (role == "tool" and as_json(each) in text) for each, role in asked):
            raise RefusedConversation(LOSES_TEXT)
        if self._offered and not self._has_tools(text, messages):
            raise RefusedConversation(LOSES_TOOLS)
        return text

    @property
    def tool_names(self) -> list[str]:
        """The names of the tools that the conversation offers."""
        return [tool["function"]["name"] for tool in self._offered.get("tools", ())]

    def names_tool(self, content: str) -> bool:
        """Tell whether an answer may call a tool of the conversation: in every format a call holds the tool's name."""
        return any(name in content for name in self.tool_names)

    def _has_tools(self, text: str, messages: Messages) -> bool:
        if not all(name in text for name in self.tool_names):
            return False
        return text != self.with_tools(None).render(messages, add_generation_prompt=True)

    def answer_text(self, prompt_ids: list[int], answer_ids: list[int]) -> str | None:
        """Return the content of the message that a server would return for an answer, None where it has none.

        With `chat.reasoning_parser` the content is what follows the reasoning. Without one it is the whole text, and
        marks of reasoning that are no special tokens stay in it: templates look for them there."""
        answer_ids = self.without_end(answer_ids)
        whole, visible = self.decode(answer_ids), self.decode(answer_ids, skip_special_tokens=True)
        if self.settings["reasoning_parser"] is None:
            return visible
        if self.reasoning is not None and self.reasoning.end in whole:
            return self._behind_reasoning(answer_ids)
        opened = self.reasoning is not None and (
            self.reasoning.begins(whole) or self.decode(prompt_ids).rstrip().endswith(self.reasoning.start)
        )
        return whole if whole == visible and not opened else None

    def without_end(self, answer_ids: list[int]) -> list[int]:
        """Return the tokens of an answer before its end of turn."""
        return answer_ids[:-1] if answer_ids and answer_ids[-1] in self.stop_ids else answer_ids

    def returned(self, text: str) -> str:
        """Return the content of an answer that is given as text: what `answer_text` returns for its tokens."""
        if self.settings["reasoning_parser"] is None or self.reasoning is None or not self.reasoning.is_one_span(text):
            return text
        return self.reasoning.content(text)

    def _behind_reasoning(self, answer_ids: list[int]) -> str | None:
        assert self.reasoning is not None
        low, high = 0, len(answer_ids)  # the least number of tokens that hold the end of the reasoning
        while low < high:
            middle = (low + high) // 2
            holds = self.reasoning.end in self.decode(answer_ids[:middle])
            low, high = (low, middle) if holds else (middle + 1, high)
        content = self.reasoning.content(self.decode(answer_ids))
        if self.reasoning.start in content or self.reasoning.end in content:
            return None  # servers differ in what they return of a second span
        of_last_token = self.reasoning.content(self.decode(answer_ids[:low]))
        return (of_last_token + self.decode(answer_ids[low:], skip_special_tokens=True)).strip()

    def render(self, messages: Messages, *, add_generation_prompt: bool) -> str:
        """Render by the template. Raises `RefusedConversation` when it does."""
        try:
            return self._rendered(messages, add_generation_prompt)
        except TemplateFailed as error:
            raise RefusedConversation(self._refusal(error)) from None
        except Unbounded as limit:
            raise RefusedConversation(f"the chat template {limit} for this conversation; {ANOTHER}") from None

    def _rendered(self, messages: Messages, add_generation_prompt: bool) -> str:
        if self._in_parts:
            messages = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages]
        options = {**self._special_tokens, **self._variables, **self._offered}
        return renderer().render(self._template, messages, options | {"add_generation_prompt": add_generation_prompt})

    def around_answer(self, before: Messages, *after: dict[str, str]) -> tuple[str, str]:
        """Return the text that the template writes before and after an answer, found with a sentinel in its place."""
        answer = {"role": "assistant", "content": SENTINEL}
        text = self.render([*before, answer, *after], add_generation_prompt=False)
        if text.count(SENTINEL) != 1:
            raise RefusedConversation(NOT_WHOLE)
        head, _, tail = text.partition(SENTINEL)
        return head, tail

    def _refusal(self, error: TemplateFailed) -> str:
        # Only words that stand in the template itself: a message put together at run time may quote the conversation.
        reason = str(error) if str(error) in self._source else error.name
        return f"the chat template refuses: {reason}"

    def holds_control_token(self, text: str) -> bool:
        """Say whether text would become tokens with which the target or the template steer, not read."""
        ids = self.encode(text)
        return not (self.control_ids.isdisjoint(ids) and self.stop_ids.isdisjoint(ids))

    def encode(self, text: str) -> list[int]:
        """Raises `RefusedConversation` for a text with a token that the target has no embedding for."""
        # The template writes its own BOS; add_special_tokens would double it.
        return self.embedded(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def embedded(self, ids: list[int]) -> list[int]:
        """Return the ids, or raise `RefusedConversation` for one that the target has no embedding for."""
        largest = max(ids, default=0)
        if self.rows is not None and largest >= self.rows:
            token = self.tokenizer.convert_ids_to_tokens(largest)
            raise NoEmbedding(f"it holds {token} (id {largest}), for which the target has no embedding")
        return ids

    def decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        text = self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def _check_template(self) -> None:
        try:
            lost = self._lost_roles()
            if lost - {"system"}:  # the template may read a list of parts, and silently lose text that is none
                self._in_parts = True
                lost_in_parts = self._lost_roles()
                self._in_parts = lost_in_parts < lost
                lost = lost_in_parts if self._in_parts else lost
        except TemplateSyntaxError as error:
            raise InputError(
                f"the chat template is not valid Jinja (line {error.lineno}); correct chat.template"
            ) from None
        if lost - {"system"}:
            raise InputError(
                f"the chat template loses the text of {' and '.join(sorted(lost))} turns; give one that renders it "
                f"with chat.template=FILE.jinja"
            )
        if lost:
            log.warning("the chat template loses the text of system turns: conversations that have one are left out")

    def _lost_roles(self) -> set[str]:
        """Return the roles whose text does not survive the template. What it refuses, each conversation shows."""
        lost: set[str] = set()
        for roles in (["user"], ["user", "assistant"], ["user", "assistant", "user"], ["system", "user"]):
            messages = [{"role": role, "content": f"{SENTINEL}{number}"} for number, role in enumerate(roles)]
            try:
                text = self._rendered(messages, roles[-1] == "user")
            except TemplateFailed:
                if self._in_parts:
                    lost |= set(roles)
                continue
            except Unbounded as limit:
                raise InputError(f"the chat template {limit} for a plain conversation; {ANOTHER}") from None
            # Templates may drop earlier answers, or parts of them: the prompt is as served all the same.
            asked = [each for each in messages if each["role"] != "assistant" or each is messages[-1]]
            # A list of parts that is written as Python would write it is lost too.
            lost |= {each["role"] for each in asked if each["content"] not in text or repr(each["content"]) in text}
        return lost

    def _warn_of_missing_generation_prompt(self) -> None:
        try:
            bare, prompt = (self.render([QUESTION], add_generation_prompt=each) for each in (False, True))
            head, _ = self.around_answer([QUESTION])
        except RefusedConversation:
            return
        missing = head.removeprefix(prompt)
        if bare == prompt and missing != head and missing.strip():
            _log_once(
                f"the chat template does not read add_generation_prompt: the target itself has to write {missing!r} "
                f"before an answer, here and in servers; give a template that does with chat.template=FILE.jinja"
            )

    # --- the end of a turn -------------------------------------------------------------------------------------------

    def _warn_of_plain_stops(self) -> None:
        special = {*self._added_ids, *self.tokenizer.all_special_ids}
        for token_id in sorted(self.stop_ids - special):
            if token_id < len(self.tokenizer):
                _log_once(
                    f"the target's eos_token_id={token_id} is {self.token_text(token_id)!r}, which is ordinary text: "
                    f"answers end there, here and in servers; correct it in config.json and generation_config.json"
                )

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id])

    def _added_stop_ids(self, stop_tokens: str | list[str]) -> frozenset[int]:
        """Return the tokens that end an answer in addition to the target's own: those given, or ("auto") the token
        with which the template ends a turn. Without it, answers would run on into turns of the user."""
        own = ", ".join(map(self.token_text, sorted(self.stop_ids))) or "none"
        texts = self._after_an_answer()
        # The first text that is not empty ends the turn.
        closing = next((ids for ids in texts if self.decode(ids).strip()), [])
        end = self._end_in(closing)
        if isinstance(stop_tokens, list):
            given = self._find_token_ids(stop_tokens)
            if end is not None and end not in given | self.stop_ids:
                _log_once(
                    f"chat.stop_tokens={stop_tokens} leaves out {self.token_text(end)}, with which the chat template "
                    f"ends a turn: answers may run on after it"
                )
            return given - self.stop_ids
        if not texts:
            _log_once("the chat template refuses a plain conversation: not checked what ends a turn")
            return frozenset()
        if end is None:
            raise InputError(
                f"chat.stop_tokens=auto, but the chat template writes {self.decode(closing)!r} after an answer, and no "
                f"special token that could end one; name the tokens that end an answer, e.g. "
                f"chat.stop_tokens=['</s>'], or give [] for the target's own alone ({own})"
            )
        if end not in self.stop_ids:
            _log_once(
                f"the chat template ends a turn with {self.token_text(end)}, which is not among the target's stop "
                f"tokens ({own}): it ends answers here (chat.stop_tokens=auto); servers need it too, as eos_token_id "
                f"in generation_config.json",
                logging.INFO,
            )
        return frozenset({end}) - self.stop_ids

    def _after_an_answer(self) -> list[list[int]]:
        """Return the token ids that the template writes after an answer; first those that it writes both at the end of
        a conversation and before another question, then those of each place."""
        for before in ([QUESTION], [{"role": "system", "content": "System0451"}, QUESTION]):
            found = []
            for after in ([], [{"role": "user", "content": "Question0452"}]):
                try:
                    head, text = self.around_answer(before, *after)
                    self.encode(head)
                    found.append(self.encode(text.partition("Question0452")[0]))
                except NoEmbedding as error:
                    raise InputError(
                        f"no conversation fits this target: {error} ({self.rows} rows); put tokenizer, chat template "
                        f"and weights of one model into its folder"
                    ) from None
                except RefusedConversation:
                    continue
            if found:
                return [common_start(*found), *found]
        return []

    def _end_in(self, ids: list[int]) -> int | None:
        """Return the first stop token of the target among the ids; if they have none, the first special token."""
        marks = [each for each in ids if each in self._added_ids and self.token_text(each).strip()]
        return next((each for each in ids if each in self.stop_ids), next(iter(marks), None))

    def _find_token_ids(self, tokens: list[str]) -> frozenset[int]:
        vocabulary = self.tokenizer.get_vocab()
        if unknown := [token for token in tokens if token not in vocabulary]:
            raise InputError(
                f"chat.stop_tokens={tokens}: {unknown[0]} is no single token of the target; give tokens as they are in "
                f"its tokenizer, e.g. chat.stop_tokens=['<|im_end|>']"
            )
        return frozenset(vocabulary[token] for token in tokens)


def ids_in_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the ids of `text` inside a longer one: SentencePiece puts a space before a text that stands alone."""
    before, together, alone = (
        tokenizer(each, add_special_tokens=False, verbose=False)["input_ids"] for each in ("\n", f"\n{text}", text)
    )
    return together[len(before) :] if together[: len(before)] == before else alone


def _template_and_variables(
    tokenizer: PreTrainedTokenizerBase, settings: ChatSettings
) -> tuple[str, str, dict[str, Any]]:
    """Return the template as it is written, as it is rendered (with the clock pinned), and its variables."""
    source = _template_source(tokenizer, settings.template)
    template = _pin_clock(source, settings.date) if "strftime_now" in source else source
    # A template that joins its BOS to a text fails on a tokenizer that has none; there it means nothing.
    tokens = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
    unset = {name: "" for name, token in tokens.items() if token is None}
    if "eos_token" in unset and re.search(r"\beos_token\b", source):
        _log_once(
            "the chat template writes eos_token, and the target's tokenizer has none: turns end without it, here and "
            "in servers; set eos_token in its tokenizer_config.json"
        )
    return source, template, unset | settings.template_kwargs


def _template_source(tokenizer: PreTrainedTokenizerBase, path: str | None) -> str:
    if path is None:
        try:
            return tokenizer.get_chat_template()
        except ValueError:
            raise InputError(
                "chat.template=null but the target's tokenizer carries no (default) chat template; "
                "give one with chat.template=FILE.jinja"
            ) from None
    try:
        require_regular(Path(path), named=f"chat.template={path}")
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"chat.template={path} cannot be read ({error.strerror}); give a Jinja file or null") from None


def _pin_clock(source: str, date: str) -> str:
    """Shadow the function through which templates read the clock by a macro that knows one day only."""
    day = datetime.datetime.fromisoformat(date)
    # A macro, because transformers hands a template plain data only: a function passed as a variable is blanked.
    written = {f"%{directive}": day.strftime(f"%{directive}") for directive in "aAbBcdfHIjmMpSuUVwWxXyYG"}
    written |= {"%-d": str(day.day), "%-m": str(day.month), "%e": f"{day.day:2}", "%F": f"{day:%Y-%m-%d}"}
    replacements = "".join(f"|replace({json.dumps(old)}, {json.dumps(new)})" for old, new in written.items())
    # The newline after endmacro is eaten by Jinja's trim_blocks, which transformers sets: the rest renders unchanged.
    return "{% macro strftime_now(format) %}{{ format" + replacements + " }}{% endmacro %}\n" + source


def as_json(text: str) -> str:
    """Return a text as JSON has it between quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def common_start(first: Items, *others: Items) -> Items:
    """Return the beginning that all of them have: tokens, or characters."""
    together = zip(first, *others, strict=False)
    return first[: sum(1 for _ in takewhile(lambda items: len({*items}) == 1, together))]


@cache
def _log_once(message: str, level: int = logging.WARNING) -> None:
    log.log(level, message)
