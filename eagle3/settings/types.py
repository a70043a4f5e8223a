"""Kinds of values that many keys share.

Bounds at the far end keep a slip of the keyboard from becoming an endless run; none of them is near what is of use.
"""

import json
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from datetime import date
from functools import cache
from typing import Annotated, Any, NotRequired, TypeVar, get_type_hints

import yaml
from pydantic import AfterValidator, ConfigDict, Field, GetCoreSchemaHandler, TypeAdapter, ValidationError, with_config
from pydantic_core import CoreSchema, PydanticCustomError, core_schema
from typing_extensions import TypedDict, is_typeddict

# Hydra has parsed the values: "1" is a text and true is no number.
STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

OPEN = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)  # of a part that a library has more keys for
UNKNOWN = "extra_forbidden"  # pydantic's word for a key that nothing takes

MOST = 2**31 - 1

Count = Annotated[int, Field(ge=1, le=MOST)]
CountOrZero = Annotated[int, Field(ge=0, le=MOST)]
Places = Annotated[int, Field(ge=1, le=1024)]  # of threads, processes, GPUs, machines: each takes memory
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]  # what NumPy takes
NotNegative = Annotated[float, Field(ge=0, le=1e9)]
Positive = Annotated[float, Field(gt=0, le=1e9)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]


LONGEST = 100  # characters of a value that a message shows


def shown(value: Any) -> str:
    """Write a value as YAML, in one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10**9, allow_unicode=True)
    text = text.removesuffix("...\n").strip()
    if not text.isprintable():  # PyYAML breaks lines at some characters
        text = json.dumps(value, default=str)
    return text if len(text) <= LONGEST else text[:LONGEST] + "…"


def wrong(rule: str) -> PydanticCustomError:
    """Make the error of a validator; `rule` follows the key and its value."""
    return PydanticCustomError("rule", "{rule}", {"rule": rule})


def fault(*key: str, value: Any, rule: str) -> ValidationError:
    """Make the error of a validator of a group, about one of the keys below it."""
    kind: Any = rule if rule == UNKNOWN else wrong(rule)
    return ValidationError.from_exception_data("group", [{"type": kind, "loc": key, "input": value}])


Kind = TypeVar("Kind")


class Settings:
    """Base of dataclasses whose fields are the keys of a config group, with their types and ranges.

    Defaults are in conf/; only a field that has one here may be left out of what `validated` makes an object of.
    `__post_init__` raises InputError for values that do not fit together.
    """

    def only(self, kind: type[Kind]) -> Kind:
        """Return the settings of `kind`, a base of this class, that are among these."""
        return kind(**{each.name: getattr(self, each.name) for each in fields(kind)})  # type: ignore[arg-type]

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        types = get_type_hints(cls, include_extras=True)
        keys: dict[str, Any] = {}
        for each in fields(cls):  # type: ignore[arg-type]
            type_ = types[each.name]
            keys[each.name] = type_ if each.default is each.default_factory is MISSING else NotRequired[type_]
        mapping = with_config(STRICT)(TypedDict(cls.__name__, keys))  # type: ignore[operator]
        return core_schema.no_info_after_validator_function(lambda values: cls(**values), handler(mapping))


def validated(schema: Any, value: Any) -> Any:
    """Return the value, as an object for Settings; ValidationError if it does not fit the schema."""
    return _adapter(schema).validate_python(value)


@cache
def _adapter(schema: Any) -> TypeAdapter:
    group = getattr(schema, "__origin__", schema)  # which says itself how strict it is
    return TypeAdapter(schema, config=None if is_typeddict(group) or is_dataclass(group) else STRICT)


def _printable(text: str) -> str:
    if not text.strip() or not text.isprintable():
        raise wrong("must be a text that is not empty, in one line")
    return text


Text = Annotated[str, AfterValidator(_printable)]


def only(value: Any, why: str) -> AfterValidator:
    """Allow one value; `why` says what needs it."""

    def checked(given: Any) -> Any:
        if given != value:
            raise wrong(f"must be {str(value).lower()}: {why}")
        return given

    return AfterValidator(checked)


def _is_date(text: str) -> str:
    with suppress(ValueError):
        if str(date.fromisoformat(text)) == text:
            return text
    raise wrong("must be a date, year-month-day")


Date = Annotated[str, AfterValidator(_is_date)]


def text_or(schema: Any, text: Any = Text) -> AfterValidator:
    """Check a text by `text`, all else by `schema`: a union would put names of its own into the key."""

    def checked(value: Any) -> Any:
        return validated(text if isinstance(value, str) else schema, value)

    return AfterValidator(checked)
