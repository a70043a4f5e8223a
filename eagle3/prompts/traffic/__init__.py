"""The traffic mix: which prompts to keep so that together they look like production traffic."""

from eagle3.prompts.traffic.features import MEASURED
from eagle3.prompts.traffic.mix import TrafficMix

__all__ = ["MEASURED", "TrafficMix"]
