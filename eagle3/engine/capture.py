"""Hidden states from inside SGLang servers: reads what the hooks in hooks/ write, and joins it request by request.

Shapes: T tokens of a request, A captured layers, H hidden size, AH = A · H, J positions with a teacher.
"""

import asyncio
import itertools
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import torch
from jaxtyping import Float, Int, Shaped, UInt8
from safetensors import safe_open
from torch import Tensor

from eagle3.engine.client import ServerFailed
from eagle3.engine.endpoint import SGLang
from eagle3.engine.hooks.eagle3_fp8 import unpacked
from eagle3.engine.process import Server
from eagle3.errors import InputError
from eagle3.settings.engine import LaunchSettings

HOOKS = Path(__file__).parent / "hooks"
MARK, FAILED = "eagle3:", "failed.txt"  # the same as in hooks/eagle3_capture.py
POLL_S = 0.005
ROWS_S = 60.0  # from the answer to a request until its rows are here: the copy from the GPU, and slow readers
NUMBERS = itertools.count()


@dataclass(frozen=True)
class Captured:
    """The states of one request: `aux` of all tokens, `last` and `teacher_argmax` of the positions with a teacher.

    In fp8 the first two are bits, with exponents (hooks/eagle3_fp8.py)."""

    aux: Shaped[Tensor, "T AH"]
    last: Shaped[Tensor, "J H"]
    teacher_argmax: Int[Tensor, " J"]
    aux_exponents: UInt8[Tensor, "T A"] | None = None
    last_exponents: UInt8[Tensor, "J 1"] | None = None

    @property
    def aux_hidden_states(self) -> Float[Tensor, "T AH"]:
        return self.aux if self.aux_exponents is None else unpacked(self.aux, self.aux_exponents)

    @property
    def last_hidden_state(self) -> Float[Tensor, "J H"]:
        return self.last if self.last_exponents is None else unpacked(self.last, self.last_exponents)


def with_hooks(settings: LaunchSettings) -> LaunchSettings:
    env = settings.env or {}
    paths = [HOOKS, *filter(None, [env.get("PYTHONPATH")])]
    return replace(settings, env={**env, "PYTHONPATH": os.pathsep.join(map(str, paths))})


@dataclass
class Wanted:
    """The rows of one request that have arrived, by the position of their first row."""

    tokens: int
    done: asyncio.Future[Captured]
    parts: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    def add(self, start: int, part: dict[str, Tensor]) -> None:
        self.parts[start] = part
        if sum(len(each["aux"]) for each in self.parts.values()) == self.tokens and not self.done.done():
            parts = [self.parts[start] for start in sorted(self.parts)]
            self.done.set_result(Captured(**{name: _joined([each[name] for each in parts]) for name in part}))


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class CaptureFolder:
    """A folder in memory that one server writes into, and in it that of this client: files are deleted once they are
    read."""

    def __init__(self, path: Path) -> None:
        self.path, self.client = path, secrets.token_hex(4)
        self.own = path / self.client
        self.own.mkdir(mode=0o700)
        self.wanted: dict[str, Wanted] = {}

    @classmethod
    def new(cls, memory: Path) -> "CaptureFolder":
        # A name of its own that nobody can foresee, mode 0700: others may write into `memory`, too.
        return cls(Path(tempfile.mkdtemp(prefix="eagle3-", dir=memory)))

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    async def watch(self) -> None:
        """Hand out rows forever; InputError with the reason if the hooks fail."""
        while True:
            for path in sorted(self.own.iterdir()):
                self._hand_out(*await asyncio.to_thread(_read, path))
            if (failed := self.path / FAILED).exists():
                reason = failed.read_text().partition("\n")[0][:300]
                raise InputError(
                    f"features.engine: capturing inside SGLang failed ({reason}); take features=huggingface, and "
                    f"report it"
                )
            await asyncio.sleep(POLL_S)

    def _hand_out(self, finite: bool, parts: list[tuple[dict[str, Any], dict[str, Tensor]]]) -> None:
        if not finite:
            raise InputError(
                "features.engine: the server's hidden states are not finite in features.dtype; look at the server's "
                "dtype and quantisation, or take features.dtype=bfloat16 (float16 ends at 65504)"
            )
        for part, tensors in parts:
            if wanted := self.wanted.get(part["id"]):  # otherwise of an attempt that was given up
                wanted.add(part["start"], tensors)


def _read(path: Path) -> tuple[bool, list[tuple[dict[str, Any], dict[str, Tensor]]]]:
    """Read whether all states of a file are finite, and its parts.

    Rows are copied: views of the file would keep all of it in memory until the last row is used."""
    row = taught = 0
    read = []
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        finite = bool(tensors.pop("finite"))
        for part in json.loads(file.metadata()["parts"]):
            rows, teachers = slice(row, row + part["rows"]), slice(taught, taught + part["teachers"])
            row, taught = rows.stop, teachers.stop
            own = {name: each[rows if name.startswith("aux") else teachers].clone() for name, each in tensors.items()}
            read.append((part, {**own, "teacher_argmax": own["teacher_argmax"].long()}))
    path.unlink()
    return finite, read


class CapturingServer(SGLang):
    """An `Endpoint` that writes the hidden states of its prompts into `folder`. `process`: if it was started here."""

    def __init__(self, url: str, folder: CaptureFolder, process: Server | None = None) -> None:
        super().__init__(url)
        self.process, self.folder = process, folder

    async def capture(
        self,
        session: aiohttp.ClientSession,
        input_ids: list[int],
        teachers: Sequence[tuple[int, int]],
        options: Mapping[str, Any],
    ) -> tuple[Captured, dict[str, Any]]:
        """Run one prompt and return its states and its `meta_info`.

        `teachers` are the spans of positions with a teacher, `options` more keys of /generate."""
        spans = ",".join(f"{begin}-{end}" for begin, end in teachers)
        rid = f"{MARK}{self.folder.client}.{next(NUMBERS)}:{spans}"
        done = asyncio.get_running_loop().create_future()
        self.folder.wanted[rid] = Wanted(len(input_ids), done)
        sampling = {"max_new_tokens": 1, "temperature": 0.0}
        try:
            _, meta = await self.generate(
                session, {"input_ids": input_ids, "sampling_params": sampling, "rid": rid, **options}
            )
            return await asyncio.wait_for(done, ROWS_S), meta
        except TimeoutError:
            raise ServerFailed("rows of a request are missing: its hooks did not run") from None
        finally:
            del self.folder.wanted[rid]
            with suppress(asyncio.CancelledError):
                done.cancel()
