"""JSON that other programs or people wrote, held against the types of the keys that are read of it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eagle3.errors import InputError
from eagle3.storage.files import read_json

DEEPEST = 32  # objects and lists inside each other
SHOWN = 60  # characters of a wrong value

Size = Annotated[int, Field(ge=1, le=2**24)]  # of a dimension
Length = Annotated[int, Field(ge=1, le=2**40)]  # in tokens
Number = Annotated[float, Field(ge=-1e18, le=1e18, allow_inf_nan=False)]
PositiveNumber = Annotated[float, Field(gt=0, le=1e18, allow_inf_nan=False)]


class JsonObject(BaseModel):
    """An object of which these keys are read; it may have others."""

    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class WeightIndex(JsonObject):
    """The index of several weight files: the file that holds each tensor, in the index's own folder."""

    weight_map: dict[str, Annotated[str, Field(pattern=r"^[^/\\\x00]+\.safetensors$")]]


def read_typed(path: Path, kind: type[JsonObject], *, made_by: str) -> dict[str, Any]:
    """Parse an object and check the types of its keys; `made_by` as in `read_json`."""
    value = read_json(path, made_by=made_by)
    require_types(value, kind, source=str(path), remedy=f"correct it, or make the file again: {made_by}")
    return value


def require_types(value: Mapping[str, Any], kind: type[JsonObject], *, source: str, remedy: str) -> None:
    """Raise InputError that names `source`, the key, its value and the rule, for a value of another type."""
    if _is_deep(value):
        raise InputError(f"{source} has more than {DEEPEST} objects and lists inside each other; {remedy}")
    try:
        kind.model_validate(value)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        key = ".".join(map(str, fault["loc"]))
        if fault["type"] == "missing":
            raise InputError(f"{source}: {key} is missing; {remedy}") from None
        given = repr(fault["input"])
        shown = given if len(given) <= SHOWN else f"{given[:SHOWN]}..."
        raise InputError(f"{source}: {key}={shown}: {fault['msg']}; {remedy}") from None


def _is_deep(value: Any) -> bool:
    level: list[Any] = [value]
    for _ in range(DEEPEST):
        level = [
            inner
            for each in level
            if isinstance(each, (dict, list))
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
    return any(isinstance(each, (dict, list)) for each in level)
