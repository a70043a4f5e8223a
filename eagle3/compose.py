"""Runs without a command line: in a notebook, a program or a test."""

from typing import Any

from hydra import compose

from eagle3.adapters.hydra import HydraException, composing
from eagle3.errors import InputError
from eagle3.hydra_run import CONF
from eagle3.messages import wrong_override
from eagle3.settings.check import check_settings


def compose_run(script: str, *overrides: str) -> Any:
    """Compose the config of train.py, precompute.py or serve.py with these overrides; return the checked run.

    Raises InputError as the command does."""
    try:
        with composing(CONF):
            config = compose(script, overrides=[*overrides])
    except HydraException as error:
        raise InputError(wrong_override(error)) from None
    return check_settings(config, script)
