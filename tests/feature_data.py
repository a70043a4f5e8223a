"""A data module over a small store, attached to the facts of a trainer that does not exist."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import defaults
import torch

from eagle3.data.datamodule import FeatureData
from eagle3.features.concat import open_source
from eagle3.head.batch import prepare_ttt
from eagle3.settings.training import PackSettings

TRAINER = {"current_epoch": 0, "accumulate_grad_batches": 1, "world_size": 1, "global_rank": 0}


def feature_data(source: Any, *, device: str = "cpu", state: dict[str, Any] | None = None, **changes: Any) -> Any:
    """`source` may be the path of a store, or several; `changes` go to FeatureData, or to the trainer."""
    facts = TRAINER | {key: value for key, value in changes.items() if key in TRAINER}
    settings = vars(defaults.part("data").read(PackSettings)) | {"rules": defaults.sample_filter()}
    settings |= {"pack_tokens": 48, "val_fraction": 0.1, "verify": False}
    settings |= {key: value for key, value in changes.items() if key not in TRAINER}
    source = open_source(source) if isinstance(source, str | list) else source
    data = FeatureData(source=source, prepare=partial(prepare_ttt, ttt_steps=3), **settings)
    strategy = SimpleNamespace(root_device=torch.device(device))
    data.trainer = SimpleNamespace(**facts, strategy=strategy, fit_loop=SimpleNamespace())  # type: ignore[assignment]
    data.setup("fit")
    if state:
        data.load_state_dict(state)
    return data
