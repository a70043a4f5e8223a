"""The SGLang that launch.python finds."""

from pathlib import Path

import pytest
import torch
from serving_fixtures import launch_settings, sglang_site

from eagle3.adapters.library import numbers
from eagle3.engine.installation import count_gpus, find_sglang
from eagle3.errors import InputError


def test_the_installation_is_found_where_the_interpreter_would_import_it(tmp_path: Path) -> None:
    site = sglang_site(tmp_path)
    assert find_sglang(launch_settings(site)) == "0.5.17"


@pytest.mark.parametrize("version", ["0.5.16", "0.4.9.post6"])
def test_an_old_sglang_is_one_line(tmp_path: Path, version: str) -> None:
    with pytest.raises(InputError, match=rf"has SGLang {version}, the oldest supported is 0\.5\.17"):
        find_sglang(launch_settings(sglang_site(tmp_path, version)))


@pytest.mark.parametrize("version", ["0.5.17", "0.5.17.post1", "0.5.20rc1", "0.10.0", "1.0"])
def test_later_versions_are_taken(version: str) -> None:
    assert numbers(version) >= (0, 5, 17)


def test_an_environment_without_sglang_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"launch\.python=.* has no SGLang; install it there"):
        find_sglang(launch_settings(tmp_path, env=None))


def test_an_interpreter_that_is_none_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"launch\.python=/no/python cannot be run"):
        find_sglang(launch_settings(tmp_path, python="/no/python"))
    with pytest.raises(InputError, match=r"launch\.python=/bin/false has no working SGLang \(exit status 1\)"):
        find_sglang(launch_settings(tmp_path, python="/bin/false"))


def test_more_gpus_than_there_are_is_one_line(tmp_path: Path) -> None:
    site = sglang_site(tmp_path)
    too_many = torch.cuda.device_count() + 1
    with pytest.raises(InputError, match=rf"launch\.tp_size={too_many}: .* sees {too_many - 1} GPUs"):
        count_gpus(launch_settings(site, tp_size=too_many))
