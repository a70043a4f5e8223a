"""Secrets stay out of what a command prints when it fails."""

import logging
import sys

import pytest
from omegaconf import DictConfig
from scripts import as_in_a_run, composed

from eagle3 import messages
from eagle3.cli import report_errors
from eagle3.progress import JsonLines
from eagle3.secrets import HIDDEN, HIDE, learn

SECRET = "hunter2-of-a-traceback"


@pytest.mark.parametrize("own", [True, False])
def test_an_exception_shows_no_secret_and_is_not_left_to_hydra_which_prints_all_overrides(
    tmp_path, capsys, monkeypatch, own
):
    if not own:  # a fault of eagle3
        monkeypatch.setattr(messages, "in_own_code", lambda error: None)

    @report_errors
    def task(config: DictConfig) -> None:
        raise RuntimeError(f"cannot log in with {config.logger.mine.api_key}")

    logger = f"+logger.mine={{_target_: mine.Logger, api_key: {SECRET}}}"
    config = as_in_a_run(composed("train", logger, return_hydra_config=True), str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        task(config)
    errors = capsys.readouterr().err
    assert ended.value.code == 1
    assert ("Traceback" in errors) is not own and f"RuntimeError: cannot log in with {HIDDEN}" in errors
    assert SECRET not in errors


@pytest.mark.parametrize("formatter", [logging.Formatter(), JsonLines()])
def test_a_logged_traceback_shows_no_secret(formatter):
    learn({"api_key": SECRET})
    try:
        raise RuntimeError(f"refused: {SECRET}")
    except RuntimeError:
        record = logging.LogRecord("eagle3.x", logging.ERROR, "f.py", 1, "worker ends", (), sys.exc_info())
    HIDE.filter(record)
    line = formatter.format(record)
    assert f"RuntimeError: refused: {HIDDEN}" in line and SECRET not in line
