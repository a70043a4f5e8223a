"""The commands that time_to_head.py times are commands of this version."""

import argparse

import pytest
from time_to_head import commands

from eagle3.compose import compose_run


@pytest.mark.parametrize("tiny", [False, True])
def test_every_step_composes_and_takes_a_target_that_nobody_trained(tmp_path, tiny):
    options = argparse.Namespace(
        work=tmp_path, launch={"tp_size": 1}, tiny=tiny, dtype="fp8", requests=512, trainer=None
    )
    for name, (script, *overrides) in commands(options, tmp_path / "target").items():
        own = [each.replace("hydra.run.dir", "run_dir") for each in overrides]
        own += ["run_dir=RUN"] if script == "serve.py" else []
        run = compose_run(script.removesuffix(".py"), *own)
        if name in ("answers", "features", "export"):  # which load it
            assert run.target.check_health is False
