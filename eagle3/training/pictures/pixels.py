"""The pixels of a picture that was drawn, for trackers that take no files."""

from pathlib import Path

import numpy as np
from jaxtyping import Float
from matplotlib.image import imread


def read_pixels(picture: Path) -> Float[np.ndarray, "height width 4"]:
    """Return red, green, blue and opacity from 0 to 1."""
    return imread(picture)
