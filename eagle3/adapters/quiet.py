"""Silences what transformers and Lightning print."""

import logging
import warnings

import transformers

from eagle3.adapters.transformers import require_transformers


def quiet_libraries() -> None:
    """Silence libraries: their progress bars for loading weights and their hints would drown ours."""
    require_transformers()
    warnings.filterwarnings("ignore", message=".*treespec, LeafSpec.*")  # between Lightning and PyTorch
    warnings.filterwarnings("ignore", message=r"`broadcast_buffers` is deprecated")  # by Lightning's DDPStrategy
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # each retry, twice
    for name in ("lightning.pytorch", "lightning.fabric", "httpx", "httpx2"):  # the last two: each request to the hub
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("lightning.pytorch.callbacks").setLevel(logging.INFO)  # only a callback that is asked for speaks
