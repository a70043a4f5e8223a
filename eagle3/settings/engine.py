"""Keys of conf/launch, and values that many keys about servers share."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from typing_extensions import TypedDict

from eagle3.settings.types import Count, Places, Text, wrong

Seconds = Annotated[float, Field(gt=0, le=1e7)]
Steps = Annotated[int, Field(ge=1, le=64)]
TopK = Annotated[int, Field(ge=1, le=1024)]
DraftTokens = Annotated[int, Field(ge=1, le=100_000)]


def _variable(name: str) -> str:
    if not name or "=" in name or "\0" in name:
        raise wrong("must be the name of a variable of the environment")
    return name


def _value(value: Any) -> Any:
    if not isinstance(value, str | int | float | bool):
        raise wrong("must be a text or a number")
    return value


class Launch(TypedDict):
    python: Text | None
    env: dict[Annotated[str, AfterValidator(_variable)], Annotated[Any, AfterValidator(_value)]] | None
    host: Text
    port: Annotated[int, Field(ge=1, le=65535)]
    dtype: Literal["auto", "half", "float16", "bfloat16", "float", "float32"]
    tp_size: Places
    mem_fraction_static: Annotated[float, Field(gt=0, lt=1)] | None
    max_running_requests: Count | None
    cuda_graph_max_bs_decode: Count | None
    overlap_schedule: bool
    trust_remote_code: bool
    extra_flags: dict[Text, Any] | None
    check: bool
    start_timeout_s: Seconds
    stop_timeout_s: Annotated[float, Field(ge=0, le=1e7)]


def _address(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise wrong("must be the address of a server, e.g. http://127.0.0.1:30000")
    return text


Address = Annotated[Text, AfterValidator(_address)]
