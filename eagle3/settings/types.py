"""Kinds of values that many keys share, and parts: groups that `_target_` names the class or function of.

Bounds at the far end keep a slip of the keyboard from becoming an endless run; none of them is near what is of use.
"""

import inspect
import json
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from datetime import date
from functools import cache
from pydoc import ErrorDuringImport, locate
from typing import TYPE_CHECKING, Annotated, Any, NotRequired, TypeVar, get_args, get_type_hints

import yaml
from pydantic import AfterValidator, ConfigDict, Field, GetCoreSchemaHandler, TypeAdapter, ValidationError, with_config
from pydantic_core import CoreSchema, PydanticCustomError, core_schema
from typing_extensions import TypedDict, is_typeddict

from eagle3.errors import first_line

# Hydra has parsed the values: "1" is a text and true is no number.
STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

OPEN = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)  # of a part that a library has more keys for
UNKNOWN = "extra_forbidden"  # pydantic's word for a key that nothing takes

Schema = TypeVar("Schema")
MOST = 2**31 - 1

Count = Annotated[int, Field(ge=1, le=MOST)]
CountOrZero = Annotated[int, Field(ge=0, le=MOST)]
Places = Annotated[int, Field(ge=1, le=1024)]  # of threads, processes, GPUs, machines: each takes memory
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]  # what NumPy takes
NotNegative = Annotated[float, Field(ge=0, le=1e9)]
Positive = Annotated[float, Field(gt=0, le=1e9)]
Share = Annotated[float, Field(ge=0, le=1)]


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


OPTIONAL = {"optional": True}  # metadata of a field whose key may be left out


class Settings:
    """Base of dataclasses whose fields are the keys of a config group, with their types and ranges.

    `validated` makes one of a mapping, which may lack only fields marked OPTIONAL: other defaults are for objects that
    are built by hand. `__post_init__` raises InputError for values that do not fit together.
    """

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        types = get_type_hints(cls, include_extras=True)
        keys: dict[str, Any] = {}
        for each in fields(cls):  # type: ignore[arg-type]
            type_ = types[each.name]
            keys[each.name] = NotRequired[type_] if each.metadata == OPTIONAL else type_
        mapping = with_config(STRICT)(TypedDict(cls.__name__, keys))  # type: ignore[operator]
        return core_schema.no_info_after_validator_function(lambda values: cls(**values), handler(mapping))


def validated(schema: Any, value: Any) -> Any:
    """Return the value, as an object for Settings; ValidationError if it does not fit the schema."""
    return _adapter(schema).validate_python(value)


_importing = ContextVar("_importing", default=True)


def validate_without_imports(schema: Any, value: Any) -> None:
    """Raise ValidationError as `validated` does, but not for keys that only a library's class knows: importing PyTorch
    or Lightning takes seconds."""
    token = _importing.set(False)
    try:
        validated(schema, value)
    finally:
        _importing.reset(token)


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


# --- parts -----------------------------------------------------------------------------------------------------------

PARTS: dict[str, Any] = {}  # by `_target_`, or the module of it: the schema of the other keys


def part_of(*targets: str, config: ConfigDict = STRICT) -> Callable[[type[Schema]], type[Schema]]:
    """Make a schema that of the parts with these `_target_`s, or with one in these modules."""

    def register(schema: type[Schema]) -> type[Schema]:
        keys = with_config(config)(schema) if is_typeddict(schema) else schema
        PARTS.update(dict.fromkeys(targets, keys))
        return schema

    return register


@part_of(
    "eagle3.features.loss_mask",
    "eagle3.head.divergence",
    "eagle3.training.callbacks.Throughput",
    "eagle3.workers.in_process.InProcess",
)
class NoKeys(TypedDict):
    pass


def _is_part(value: dict[Any, Any]) -> dict[Any, Any]:
    """Check the keys of a part by its schema; of one of others, that it is there and takes these keys."""
    target, keys = value.get("_target_"), {key: given for key, given in value.items() if key != "_target_"}
    if not isinstance(target, str):
        raise fault("_target_", value=target, rule="must name the class that the group is built of")
    schema = PARTS.get(target) or PARTS.get(target.rpartition(".")[0])
    if schema:
        validated(schema, keys)
    if _importing.get() and (schema is None or getattr(schema, "__pydantic_config__", STRICT) == OPEN):
        found = _require_taken(target, keys)
        if schema is None and (schema := _schema_of_base(found)):
            validated(_of_given_keys(schema), keys)
    return value


def _schema_of_base(found: Any) -> Any:
    """Return the schema of the part that a user's own class is derived from, or that has another name here."""
    for base in (found, *getattr(found, "__mro__", ())):
        for target, schema in PARTS.items():
            if target.rpartition(".")[2] == getattr(base, "__name__", None) and locate(target) is base:
                return schema
    return None


@cache
def _of_given_keys(schema: Any) -> Any:
    """Return the schema for keys that are given; others pass, and none must be there: a derived class has defaults."""
    types = get_type_hints(schema, include_extras=True)
    if is_dataclass(schema):
        types = {each.name: types[each.name] for each in fields(schema)}
    return with_config(OPEN)(TypedDict(schema.__name__, types, total=False))  # type: ignore[operator]


def _require_taken(target: str, keys: dict[Any, Any]) -> Any:
    """Import what `_target_` names, and return it if it takes these keys."""
    try:
        found = locate(target)
        if found is None:
            raise TypeError("modules are found in the clone, in PYTHONPATH and next to the folder of --config-dir")
        parameters = inspect.signature(found).parameters  # type: ignore[arg-type]
    except (ErrorDuringImport, TypeError, ValueError) as error:
        if isinstance(getattr(error, "value", None), KeyboardInterrupt):  # pydoc wraps any exception
            raise KeyboardInterrupt from None
        rule = f"names no class or function that can be imported ({first_line(error)})"
        raise fault("_target_", value=target, rule=rule) from None
    others = {key: value for key, value in keys.items() if key not in parameters}
    rest = [parameter.annotation for parameter in parameters.values() if parameter.kind is parameter.VAR_KEYWORD]
    for schema in get_args(rest[0]) if rest else ():  # **settings: Unpack[schema], inherited from a class of ours
        validated(schema, others)
    if others and not rest:
        key, value = next(iter(others.items()))
        raise fault(str(key), value=value, rule=UNKNOWN)
    return found


if TYPE_CHECKING:
    Part = Any  # a mapping in the config, the object that is built of it in the class that uses it
else:
    Part = Annotated[dict[Any, Any], AfterValidator(_is_part)]
