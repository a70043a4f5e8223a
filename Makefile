# Both commands make their own environment (.venv) on a fresh machine with Python 3.11 to 3.13 and a package index.
PYTHON ?= python3
# The CPU build of PyTorch: what this machine already has, else the newest from the index; set TORCH=torch for a GPU.
TORCH ?= torch==2.13.0

.PHONY: quickstart test docs
quickstart: .venv/ready  ## prompts → answers → features → training → export → check → accept length, on the bundled target
	.venv/bin/python benchmarks/quickstart.py

test: .venv/ready  ## lint, types, the order of the rooms, tests
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy --num-workers 2
	.venv/bin/lint-imports
	.venv/bin/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder  # a file in one process, in our order

docs: .venv/ready  ## the site of the pages, in build/site; a link that leads nowhere ends it
	NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --strict --config-file docs/site/mkdocs.yml

.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --upgrade pip
	.venv/bin/python -m pip install --quiet "$(TORCH)"
	.venv/bin/python -m pip install --quiet --editable ".[dev]"
	touch .venv/ready
