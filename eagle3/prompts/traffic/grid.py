"""Features of a prompt for the traffic mix, their bins, and the table of joint bins. Shapes: C cells."""

import math
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eagle3.prompts.filters import UNKNOWN, detect_language, prompt_characters, split_code, user_turns
from eagle3.prompts.reading.prompt import Prompt

NUMERIC = ("turns", "characters", "code_share")
FLAGS = ("tools", "system_prompt")
FLAG_BINS = ("without", "with")
OTHER = "other"

# Tool definitions in text: Hermes and Qwen, Mistral, the JSON of OpenAI, Llama and Anthropic.
TOOL_DEFINITIONS = re.compile(
    r'<tools>|<functions>|\[AVAILABLE_TOOLS\]|"type":\s?"function"|"parameters":\s?\{|"input_schema":\s?\{'
)


def measure(prompt: Prompt) -> dict[str, float | str]:
    """Return the value of each feature. Imported answers do not count: they are not part of incoming traffic."""
    turns = user_turns(prompt)
    split = split_code(turns)
    tools = bool(prompt.tools) or any(map(TOOL_DEFINITIONS.search, prompt.asked()))
    return {
        "turns": len(turns),
        "characters": prompt_characters(prompt),
        "code_share": split.code_share,
        "language": detect_language(split.prose),
        "tools": FLAG_BINS[tools],
        "system_prompt": FLAG_BINS[any(message["role"] == "system" for message in prompt.messages)],
    }


@dataclass(frozen=True)
class Feature:
    """A measured value in bins, given by lower edges for numbers, by names otherwise."""

    name: str
    bins: tuple[str, ...]  # labels
    edges: tuple[float, ...] | None

    def code(self, value: Any) -> int:
        """Return the bin of a measured value. A number below the first edge is in the first bin."""
        if self.edges is not None:
            return max(bisect_right(self.edges, value) - 1, 0)
        return self.bins.index(value if value in self.bins else OTHER)


class Grid:
    """The table of all joint bins. Strata come first in the numbering, so that adjacent cells share a stratum."""

    def __init__(self, features: list[Feature], strata: Sequence[str]):
        by_name = {feature.name: feature for feature in features}
        self.strata = list(strata)
        self.features = {name: by_name[name] for name in dict.fromkeys([*strata, *by_name])}

    def table_shape(self, names: list[str]) -> tuple[int, ...]:
        return tuple(len(self.features[name].bins) for name in names)

    def cell(self, measured: Mapping[str, Any]) -> int:
        cell = 0
        for name, feature in self.features.items():
            cell = cell * len(feature.bins) + feature.code(measured[name])
        return cell

    def bin_of_cell(self, cells: np.ndarray, names: list[str]) -> np.ndarray:
        """Return for each cell its bin in the smaller table over `names`, [C]."""
        codes = dict(zip(self.features, np.unravel_index(cells, self.table_shape(list(self.features))), strict=True))
        return np.ravel_multi_index(tuple(codes[name] for name in names), self.table_shape(names))

    def shares(self, cells: np.ndarray, counts: np.ndarray, names: list[str]) -> np.ndarray:
        """Return the shares of `counts` in `cells` over the bins of `names`; cells, counts: [C]."""
        bins = math.prod(self.table_shape(names))
        return np.bincount(self.bin_of_cell(cells, names), weights=counts, minlength=bins) / counts.sum()

    def labels(self, names: list[str], bin: int) -> dict[str, str]:
        """Return the labels of a bin of the table over `names`."""
        codes = np.unravel_index(bin, self.table_shape(names))
        return {name: self.features[name].bins[code] for name, code in zip(names, codes, strict=True)}


def features(bins: Mapping[str, Any]) -> list[Feature]:
    """Return the features of prompts.traffic.bins, tools and system_prompt."""
    found = []
    for name in NUMERIC:
        if edges := bins.get(name):
            labels = [_label(name, low, high) for low, high in zip(edges, [*edges[1:], None], strict=True)]
            found.append(Feature(name, tuple(labels), tuple(map(float, edges))))
    if "language" in bins:
        found.append(Feature("language", (*map(str, bins["language"]), OTHER, UNKNOWN), None))
    return found + [Feature(name, FLAG_BINS, None) for name in FLAGS]


def _label(name: str, low: float, high: float | None) -> str:
    if high is None:
        return f"{low:g} and more"
    if name == "code_share":
        return f"{low:g} to below {high:g}"
    return f"{low:g}" if high - low == 1 else f"{low:g} to {high - 1:g}"
