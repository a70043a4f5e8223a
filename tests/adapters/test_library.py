"""An installation that does not fit is one line that says what is missing, what is supported and what to install."""

import re
import tomllib
from importlib import import_module
from importlib.metadata import version

import pytest

from eagle3 import ROOT
from eagle3.adapters.hydra import HYDRA
from eagle3.adapters.library import Library, has_part
from eagle3.adapters.lightning import LIGHTNING
from eagle3.adapters.transformers import TRANSFORMERS
from eagle3.errors import InputError

LIBRARIES = (HYDRA, LIGHTNING, TRANSFORMERS)


def numpy(oldest: str = "1.0", newest: str = "99.0", parts: tuple[str, ...] = ()) -> Library:
    return Library("numpy", oldest=oldest, newest=newest, parts=parts)


def test_an_installation_that_is_too_old_is_one_line():
    with pytest.raises(InputError, match=r"numpy .* is too old; numpy 98 to 99.0 is supported: pip install"):
        numpy(oldest="98").require()


def test_a_newer_release_that_has_all_parts_is_a_warning(caplog):
    numpy(newest=version("numpy").rpartition(".")[0]).require()  # later patch releases are supported
    assert not caplog.records
    numpy(newest="1.0").require()
    assert "is newer than 1.0, the newest release that is tested" in caplog.text


def test_a_module_that_is_gone_is_one_line():
    line = r"numpy .* does not fit \(No module named 'numpy\.gone'\); numpy 1.0 to"
    with pytest.raises(InputError, match=line), numpy().uses():
        import_module("numpy.gone")


def test_an_argument_is_looked_for_in_the_signature():
    assert has_part("shutil:copyfile(follow_symlinks)") and not has_part("shutil:copyfile(no_such_argument)")


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.package)
def test_the_installed_release_is_supported_and_the_oldest_is_that_of_pyproject(library):
    library.require()
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    [bound] = [each for each in dependencies if re.match(rf"{library.package}\b(?!-)", each)]
    assert f">={library.oldest}" in bound
