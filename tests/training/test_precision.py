"""trainer=auto: bf16 where there is a GPU to train on, float32 on the CPU."""

import pytest
import torch
from hydra import compose, initialize_config_dir
from stores import CONF

from eagle3.commands.train import chosen_precision


@pytest.mark.parametrize(
    ("accelerator", "gpu", "precision"),
    [("auto", True, "bf16-mixed"), ("auto", False, "32-true"), ("gpu", True, "bf16-mixed"), ("cpu", True, "32-true")],
)
def test_auto_takes_bf16_where_it_trains_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, accelerator: str, gpu: bool, precision: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert chosen_precision("auto", accelerator) == precision
    assert chosen_precision("32-true", accelerator) == "32-true"


def test_the_trainer_that_is_taken_by_default_decides_by_the_machine() -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        trainer = compose("train").trainer
    assert (trainer.precision, trainer.accelerator) == ("auto", "auto")
