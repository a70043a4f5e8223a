"""Keys of conf/launch, and values that many keys about servers share."""

import os
import sys
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from eagle3.errors import InputError
from eagle3.settings.types import Count, Places, Settings, Text, wrong

Seconds = Annotated[float, Field(gt=0, le=1e7)]
Steps = Annotated[int, Field(ge=1, le=64)]
TopK = Annotated[int, Field(ge=1, le=1024)]
DraftWindow = Annotated[int, Field(ge=64, le=2**24)]  # holds every path of a draft
DraftTokens = Annotated[int, Field(ge=1, le=100_000)]
Temperature = Annotated[float, Field(ge=0, le=100)]  # 0: greedy


def _value(value: Any) -> Any:
    if not isinstance(value, str | int | float | bool):
        raise wrong("must be a text or a number")
    return value


@dataclass(frozen=True, kw_only=True)
class LaunchSettings(Settings):
    """Settings that SGLang servers are started with."""

    python: Text | None
    env: dict[Text, Annotated[Any, AfterValidator(_value)]] | None
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

    @property
    def interpreter(self) -> str:
        return self.python or sys.executable

    @property
    def environment(self) -> dict[str, str]:
        """Our variables without PYTHONPATH, which is for this project's interpreter, then `env`."""
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return inherited | {name: str(value) for name, value in (self.env or {}).items()}

    def require_room(self, concurrency: int, *, setting: str) -> None:
        """Raise InputError if requests would wait in a queue; `setting` is the key that `concurrency` comes from."""
        room = self.max_running_requests
        if room is None or room < concurrency:
            raise InputError(
                f"launch.max_running_requests={room} does not hold {setting}={concurrency}: requests would wait in a "
                f"queue; set launch.max_running_requests={concurrency}"
            )


def _address(text: str) -> str:
    try:
        parts = urlsplit(text)
        whole = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # of the port, or of an IPv6 address
        whole = False
    if not whole or "?" in text or "#" in text:
        raise wrong("must be the address of a server, without a query, e.g. http://127.0.0.1:30000")
    return text


Address = Annotated[Text, AfterValidator(_address)]
