"""The ways of decoding that heads are compared in: every shape of a draft at every temperature."""

from typing import NamedTuple

from eagle3.draft_shape import Shape
from eagle3.settings.serving import CompareSettings


class Way(NamedTuple):
    """One way to decode: the target's tokens at a temperature, drafts of a shape; `rejection`: drafts are sampled."""

    temperature: float
    shape: Shape
    rejection: bool = False

    @property
    def sampling(self) -> str:
        if self.temperature == 0:
            return "greedy"
        return f"T = {self.temperature:g}" + (", rejection sampling" if self.rejection else "")


def all_ways(settings: CompareSettings, *, rejection: bool = False) -> list[Way]:
    """Return every shape at every temperature; with `rejection` chains also as SGLang's rejection sampling."""
    shapes = settings.drafts()
    found = [Way(temperature, shape) for temperature in dict.fromkeys(settings.temperatures) for shape in shapes]
    if not rejection:
        return found
    return [*found, *(Way(*way[:2], rejection=True) for way in found if way.temperature and way.shape.topk == 1)]
