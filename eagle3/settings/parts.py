"""Parts: groups of a config whose `_target_` names the class or function that is built of the other keys."""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from pydoc import ErrorDuringImport, locate
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import hydra.utils
from pydantic import ConfigDict, GetCoreSchemaHandler, with_config
from pydantic_core import CoreSchema, core_schema
from typing_extensions import TypedDict, is_typeddict

from eagle3.adapters.hydra import InstantiationException
from eagle3.errors import InputError, first_line
from eagle3.settings.types import OPEN, STRICT, UNKNOWN, Settings, fault, validated

Schema = TypeVar("Schema")
Kind = TypeVar("Kind", bound=Settings)
Built = TypeVar("Built")


@dataclass(frozen=True)
class Part:
    """A checked part. `keys` are plain values; parts inside are mappings with a `_target_` of their own."""

    target: str
    keys: dict[str, Any]

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(_checked, handler(dict[Any, Any]))

    def build(self, *, leave_out: Sequence[str] = (), group: str = "", **given: Any) -> Any:
        """Instantiate the part with its keys, except those to `leave_out`, and with what only the program knows.

        The call itself is ours, not Hydra's: `given` stay the objects they are, and errors keep their type."""
        values = {key: value for key, value in self.plain().items() if key not in leave_out}
        try:
            made = hydra.utils.instantiate(values, _convert_="all", _partial_=True)
        except InstantiationException as error:  # of a part inside
            if isinstance(error.__cause__, InputError):
                raise error.__cause__ from None
            raise
        try:
            inspect.signature(made).bind(**given)
        except TypeError as error:
            name = f"{group}._target_".removeprefix(".")
            raise InputError(f"{name}={self.target} cannot be built ({error}); correct its keys") from None
        return made(**given)

    def build_kind(self, group: str, base: type[Built], **given: Any) -> Built:
        """Build a part whose class may be the user's own, and must be derived from `base`."""
        found = locate(self.target)
        derived = issubclass(found, base) if isinstance(found, type) else True  # of a function only its result shows it
        try:
            made = self.build(group=group, **given) if derived else None
        except Exception as error:  # of a library's class, or of a package that it needs
            if isinstance(error, InputError) or not (isinstance(error, ImportError) or self.target.startswith(LIBRARY)):
                raise
            message = f"{group}._target_={self.target} cannot be built ({first_line(error)}); correct its keys, or "
            raise InputError(f"{message}install what it needs") from error
        if not isinstance(made, base):
            raise InputError(f"{group}._target_={self.target} must be derived from {base.__module__}.{base.__name__}")
        return made

    def read(self, kind: type[Kind]) -> Kind:
        """Make settings of this kind from the keys that have its fields' names."""
        names = {each.name for each in fields(kind)}  # type: ignore[arg-type]
        return validated(kind, {key: value for key, value in self.keys.items() if key in names})

    def with_keys(self, **changes: Any) -> "Part":
        return replace(self, keys=self.keys | changes)

    def plain(self) -> dict[str, Any]:
        """Return the part as YAML has it."""
        return {"_target_": self.target, **self.keys}


def plain(value: Any) -> Any:
    """Return settings as dicts and lists, as YAML has them."""
    if isinstance(value, Part):
        return value.plain()
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(inside) for key, inside in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


# --- schemas ---------------------------------------------------------------------------------------------------------

LIBRARY = ("lightning.", "torch.")
WHERE = "modules are found in the clone, in PYTHONPATH and next to the folder of --config-dir"
PARTS: dict[str, Any] = {}  # by `_target_`, or the module of it: the schema of the other keys


def register_schema(*targets: str, config: ConfigDict = STRICT) -> Callable[[type[Schema]], type[Schema]]:
    """Register a schema for these `_target_`s, or for all in these modules."""

    def register(schema: type[Schema]) -> type[Schema]:
        keys = with_config(config)(schema) if is_typeddict(schema) else schema
        PARTS.update(dict.fromkeys(targets, keys))
        return schema

    return register


@register_schema(
    "eagle3.features.loss_mask",
    "eagle3.head.divergence",
    "eagle3.training.callbacks.Throughput",
    "eagle3.workers.in_process.InProcess",
)
class NoKeys(TypedDict):
    pass


_importing = ContextVar("_importing", default=True)


def validate_without_imports(schema: Any, value: Any) -> None:
    """Raise ValidationError as `validated` does, but not for keys that only a library's class knows: importing PyTorch
    or Lightning takes seconds."""
    token = _importing.set(False)
    try:
        validated(schema, value)
    finally:
        _importing.reset(token)


def _checked(value: dict[Any, Any]) -> Part:
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
    return Part(target, keys)


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


def imported(path: str, key: str) -> Any:
    """Import what `key` names; InputError if there is no such thing."""
    try:
        found = locate(path) if re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", path) else None
    except ErrorDuringImport as error:
        if isinstance(error.value, KeyboardInterrupt):  # pydoc wraps any exception
            raise KeyboardInterrupt from None
        raise InputError(f"{key}={path} cannot be imported ({first_line(error)}); correct its module") from None
    if found is None:
        raise InputError(f"{key}={path} names nothing that can be imported; give MODULE.NAME ({WHERE})")
    return found


def _validate_plain(parameters: Iterable[inspect.Parameter], keys: dict[Any, Any]) -> None:
    """Check the keys whose annotation is a plain type; None passes where it is the default. A function cannot be given
    by its name, of which Lightning would silently do nothing."""
    parameters = list(parameters)
    for each in parameters:
        kinds = [get_origin(kind) or kind for kind in (each.annotation, *get_args(each.annotation))]
        if Callable in kinds and str not in kinds and isinstance(value := keys.get(each.name), str):
            rule = f"must be a function; give {{_target_: hydra.utils.get_method, path: {value}}}"
            raise fault(each.name, value=value, rule=rule)
    types = {
        each.name: kind
        for each in parameters
        for kind in (bool, int, float, str)
        if each.annotation in (kind, kind.__name__) and not (keys.get(each.name) is each.default is None)
    }
    validated(with_config(OPEN)(TypedDict("Arguments", types, total=False)), keys)  # type: ignore[operator]


def _require_taken(target: str, keys: dict[Any, Any]) -> Any:
    """Import what `_target_` names, and return it if it takes these keys."""
    try:
        found = locate(target)
        if found is None:
            raise TypeError(WHERE)
        parameters = inspect.signature(found).parameters  # type: ignore[arg-type]
    except (ErrorDuringImport, TypeError, ValueError) as error:
        if isinstance(getattr(error, "value", None), KeyboardInterrupt):  # pydoc wraps any exception
            raise KeyboardInterrupt from None
        rule = f"names no class or function that can be imported ({first_line(error)})"
        raise fault("_target_", value=target, rule=rule) from None
    _validate_plain(parameters.values(), keys)
    others = {key: value for key, value in keys.items() if key not in parameters}
    rest = [parameter.annotation for parameter in parameters.values() if parameter.kind is parameter.VAR_KEYWORD]
    for schema in get_args(rest[0]) if rest else ():  # **settings: Unpack[schema], inherited from a class of ours
        validated(schema, others)
    if others and not rest:
        key, value = next(iter(others.items()))
        own = target not in PARTS
        rule = f"is no argument of {target}, which takes {', '.join(parameters) or 'none'}" if own else UNKNOWN
        raise fault(str(key), value=value, rule=rule)
    return found
