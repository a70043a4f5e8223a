"""Loads that were measured once on two servers."""

from pathlib import Path
from typing import Any

import pytest
from serving_fixtures import serving
from small_servers import head_server, plain_server, plan

from eagle3.serving.bench.loads import measure_running
from eagle3.settings.serving import Side


@pytest.fixture(scope="session")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[Side, Any]]:
    """A folder with the results of both servers, and what they say of themselves. Tests only read it."""
    folder, information = tmp_path_factory.mktemp("bench"), {}
    with serving(plain_server()) as plain_url, serving(head_server()) as head_url:
        measure_running(plan(plain_url=plain_url, head_url=f"{head_url}/"), folder, information)
    return folder, information
