"""The reason of a failed start is found in the log, in one line."""

import pytest

from eagle3.engine.log import failure_reason, last_stage

CHAIN_OF_ERRORS = """\
Traceback (most recent call last):
  File "a.py", line 1, in f
KeyError: 'x'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "a.py", line 2, in f
ValueError: the head does not fit
"""
HARMLESS = """\
[2026-01-01 00:00:00] Failed to import a plugin: Traceback (most recent call last):
  File "plugin.py", line 1
ModuleNotFoundError: No module named 'plugin'
"""
REPORTED = """\
[2026-01-01 00:00:00 TP0] Scheduler hit an exception: Traceback (most recent call last):
  File "runner.py", line 1
AttributeError: 'XForCausalLM' object has no attribute 'set_eagle3_layers_to_capture'

"""
FOLLOWING = "Traceback (most recent call last):\n  File 'engine.py'\nEOFError\n"


@pytest.mark.parametrize(
    ("text", "status", "reason"),
    [
        (HARMLESS + CHAIN_OF_ERRORS, 1, "ValueError: the head does not fit"),
        ("TP0] Scheduler hit an exception: " + CHAIN_OF_ERRORS + FOLLOWING, 1, "ValueError: the head does not fit"),
        (HARMLESS + REPORTED + FOLLOWING, 1, "SGLang cannot capture hidden states from this target's model class"),
        ("usage: x.py\nlaunch_server.py: error: unrecognized arguments: --x\n", 2, "unrecognized arguments"),
        ("torch.OutOfMemoryError: CUDA out of memory.\n", 1, "lower launch.mem_fraction_static"),
        ("Loading\n", -9, "ended by SIGKILL"),
        ("\x1b[31mValueError\x1b[0m: no \x07bell\x1b[2J\n", 1, "ValueError: no  bell"),
        ("", 1, "it printed nothing"),
    ],
)
def test_the_reason_of_a_failed_start_is_found_in_the_log(tmp_path, text, status, reason):
    log = tmp_path / "server.log"
    log.write_text(text)
    assert reason in failure_reason(log, status)
    assert failure_reason(log, status).isprintable()


def test_a_log_that_is_no_text_or_very_long_is_read_all_the_same(tmp_path):
    log = tmp_path / "server.log"
    log.write_bytes(b"\xff\xfe old\n" * 300_000 + "ValueError: ü\n".encode())
    assert last_stage(log) == "ValueError: ü"
    assert failure_reason(log, 1) == "ValueError: ü"
