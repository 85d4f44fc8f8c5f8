# Everything a developer or a first-time user runs. `make` alone lists the targets.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
MODEL  ?= smollm2-135m-instruct
STAMP  := $(VENV)/.installed
DEV    := $(VENV)/.installed-dev

# A dozen agents that think for 10 to 20 seconds, at five times the speed, where the device holds half of them.
DEMO   := --kv 6x800 --agents 12 --rate 0.2 --context 512 --turns 3 --think 10:20 --completion-tokens 48 \
	--time-scale 0.2 --seed 1
# The eighty agents, in real time, on a device that holds twenty.
EIGHTY := --kv 20x1024 --agents 80 --rate 0.2 --context 1024 --turns 6 --think 10:20 --seed 1

# What Numba may compile for on a processor that could do more.
AVX2   := +avx2,+avx,+fma,+f16c,+bmi,+bmi2,+lzcnt,+popcnt,+movbe,+sse4.2

# One thread for each process: a second one gains nothing with tiny models. One process more than cores, because tests
# of servers mostly wait.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
CORES  := --numprocesses $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1) --maxprocesses 5 --dist worksteal

INSTALL := $(BIN)/python -m pip install --constraint constraints.txt
# Pip has nothing to say that is of use here.
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev model folder serve demo report test test-all test-rare test-clients test-frameworks test-agents test-browser test-wheel wheel-tests generate lint docs notebooks notebooks-write dist release image bench bench-kv bench-breakpoints bench-grammars bench-agents bench-fairness bench-kernels-small soak soak-short gpu-check gpu-wheels gpu-rivals clean

help:            ## list the targets
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/'

setup: $(STAMP)  ## make .venv with what serving and `make test` need

setup-dev: $(DEV)  ## add what checks, pages, notebooks, releases and test-all need

NEEDED     := Djinn needs Python 3.11 or newer. If it has another name here: make setup PYTHON=python3.12
NO_PYTHON  := There is no $(PYTHON) here. $(NEEDED)
NO_VENV    := $(PYTHON) has no ensurepip, and so makes no environments. On Debian and Ubuntu: apt-get install python3-venv
CPU_BUILD  := On Linux, PyTorch comes with CUDA and takes several GB more. Its CPU build: \
	PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make setup

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) > /dev/null || { echo '$(NO_PYTHON)' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "$(PYTHON) is %s. $(NEEDED)" % sys.version.split()[0])'
	@$(PYTHON) -c 'import ensurepip' 2> /dev/null || { echo '$(NO_VENV)' >&2; exit 1; }
	@echo 'Djinn and what its tests need go to $(VENV): 2.3 GB, from 0.6 GB of downloads. It takes two minutes or more.'
	@[ -n "$$PIP_EXTRA_INDEX_URL" ] || [ "$$(uname)" != Linux ] || echo '$(CPU_BUILD)'
	@echo '1 of 3: an empty environment'
	@$(PYTHON) -m venv $(VENV)
	@$(INSTALL) --quiet --upgrade pip
	@echo '2 of 3: PyTorch'
	@$(INSTALL) torch
	@echo '3 of 3: Djinn and all other packages'
	@$(INSTALL) --editable '.[test]'
	@touch $(STAMP)

$(DEV): $(STAMP)
	@echo 'What checks, pages, notebooks, releases and test-all need goes to $(VENV) too: 0.8 GB, from 0.2 GB of downloads. It takes a minute or more.'
	@$(INSTALL) --editable '.[dev]'
	@touch $(DEV)

model: setup     ## fetch the default model
	$(BIN)/djinn models pull $(MODEL)

folder: setup    ## make a Transformers folder of the default model, for the load generator and the benchmarks
	$(BIN)/djinn models export $(MODEL)

serve: model     ## serve the default model on http://127.0.0.1:8000
	$(BIN)/djinn serve --model $(MODEL)

demo: folder     ## serve a real model, drive a dozen agents against it, show the report
	$(BIN)/python -m loadgen density --target djinn $(DEMO) --output runs

report: folder   ## every experiment small, in a quarter of an hour: report/index.html
	$(BIN)/python -m loadgen all --quick

test: model      ## run the tests
	$(PYTEST) $(CORES)

# CI has made the release by then, beside lint, and has agents run too where they can.
RELEASE ?= release
BESIDE  ?=
RERUNS  ?=

# Playwright runs an event loop in each of its processes, and the tests of wheels share one environment in their order.
test-all: setup-dev model $(RELEASE)  ## all that CI runs, next to lint and docs: half an hour
	$(PYTEST) $(RERUNS) -m "not wheel and not browser and not agents and not rare" --hypothesis-profile full $(CORES)
	$(PYTEST) $(RERUNS) -m browser tests/browser $(CORES)
	$(MAKE) --jobs 3 --output-sync=line soak-short wheel-tests $(BESIDE) bench-kernels-small

test-rare: setup-dev model  ## tests of further devices, frameworks, generators and notebooks, which CI leaves out
	$(PYTEST) -m rare $(CORES)

test-clients: setup-dev  ## make clients from the OpenAPI document with standard generators, and run them
	$(PYTEST) -m clients tests/clients

test-frameworks: setup-dev model  ## run agents of the common frameworks, unmodified, against a server
	$(PYTEST) -m frameworks tests/clients/frameworks

# AGENTS='codex claude-code' runs only these.
test-agents: setup-dev model  ## install coding agents from npm and PyPI, and run them, unmodified, without a network
	$(BIN)/python -m tests.clients.agents $(AGENTS)

test-browser: setup-dev  ## drive the page in chromium-headless-shell, which must be installed
	$(PYTEST) -m browser tests/browser $(CORES)

# WHEEL_PYTHON=python3.13 tries another Python.
test-wheel: release wheel-tests  ## install the wheels into empty environments, with and without extras, serve and call

wheel-tests:
	$(PYTEST) $(RERUNS) -m wheel tests/release

generate: setup-dev  ## write the blocking client from the one for asyncio
	$(BIN)/python client/_generate.py

lint: setup-dev  ## style, types, and which room imports which
	$(BIN)/python client/_generate.py --check
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/mypy

docs: setup-dev  ## build the site of the documentation: build/site/index.html
	$(BIN)/python -m docs.site
	$(BIN)/zensical build --strict --clean

notebooks: setup-dev model  ## run docs/notebooks/ from their first cells to their last, and write nothing: two minutes
	$(BIN)/python -m docs.notebooks

# On a machine that does nothing else: figures of a busy one would take the place of good ones.
notebooks-write: setup-dev model  ## run them, and keep what they print and draw
	$(BIN)/python -m docs.notebooks --write

# Of the last commit, whatever else is here. Its bytes depend on that and on the versions in constraints.txt alone.
dist: setup-dev  ## the wheels of the server and of the client, and the source that they are built from: dist/
	rm -rf build/release dist
	git clone --quiet . build/release
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python -m build --no-isolation --outdir dist build/release
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python -m build --no-isolation --wheel --outdir dist build/release/client

# The wheels are installed twice: by their names, pip notes no path of this machine, which the list would have. The list's first
# component is the project, whose version is not in its pyproject.toml.
LISTED := build/release/.venv

release: dist    ## the same with a list of all packages that it runs with (SBOM), and checksums
	$(BIN)/python -m venv --clear --without-pip $(LISTED)
	$(BIN)/python -m pip --python $(LISTED)/bin/python install --quiet --no-compile --constraint constraints.txt \
		dist/djinn_client-*.whl "$$(echo dist/djinn_server-*.whl)[loadgen,otel]"
	$(BIN)/python -m pip --python $(LISTED)/bin/python install --quiet --no-compile --force-reinstall --no-deps --no-index \
		--find-links dist djinn-server djinn-client
	version=$$($(LISTED)/bin/python -c 'from importlib.metadata import version; print(version("djinn-server"))') && \
		sed "s/^dynamic = .*/version = \"$$version\"/" build/release/pyproject.toml > $(LISTED)/pyproject.toml
	$(BIN)/cyclonedx-py environment --output-reproducible --pyproject $(LISTED)/pyproject.toml --mc-type application \
		--output-file dist/djinn.cdx.json $(LISTED)/bin/python
	cd dist && sha256sum * > SHA256SUMS

# It needs root, mmdebstrap and buildah; not in CI, for its ten minutes.
image:           ## prove the Dockerfile without Docker or a registry: ten minutes
	docker/build-here.sh

# The load of agents that never think: so many streams at once, and then single prompts of 1,000 tokens.
PEERS   := --target djinn --target vllm --target llamacpp --target transformers
STREAMS := --turns 1 --think 0:0 --system-tokens 0 --repeats 3 --output benchmarks/results
bench: folder    ## decode and time to first token beside vLLM's CPU build, llama.cpp and Transformers
	$(BIN)/python -m loadgen peers install vllm
	$(BIN)/python -m loadgen peers install llamacpp
	for agents in 1 8 32; do $(BIN)/python -m loadgen density $(PEERS) $(STREAMS) \
		--agents $$agents --rate inf --context 100 --completion-tokens 64 || exit; done
	$(BIN)/python -m loadgen density $(PEERS) $(STREAMS) \
		--agents 5 --arrivals constant --rate 0.1 --context 1000 --completion-tokens 2

bench-kv: setup  ## KV moves beside a plain copy, and what a session that was away waits for
	$(BIN)/python -m benchmarks.gpu_check --cpu --only swap

bench-fairness: folder  ## a victim's waits beside clients that try to harm it
	$(BIN)/python -m benchmarks.fairness

bench-breakpoints: setup  ## what pausing, resuming and steering cost, and what they cost others
	$(BIN)/python -m benchmarks.gpu_check --cpu --only breakpoints

bench-grammars: folder  ## what JSON schemas cost a decode step
	$(BIN)/python -m benchmarks.grammars

bench-agents: folder  ## eighty agents against Djinn under each policy, vLLM and llama.cpp: an hour
	$(BIN)/python -m loadgen peers install vllm
	$(BIN)/python -m loadgen peers install llamacpp
	$(BIN)/python -m loadgen density --target djinn --target djinn+lru --target djinn+none --target vllm \
		--target llamacpp $(EIGHTY) --output benchmarks/results

# The second run is without AVX-512: the same as the first where the processor has none.
bench-kernels-small: setup  ## products of few layers, with all of the processor's instructions and without AVX-512
	$(BIN)/python -m benchmarks.kernels linear --small --rows 1 16
ifeq ($(shell uname -m),x86_64)
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 NUMBA_CPU_NAME=haswell NUMBA_CPU_FEATURES=$(AVX2) \
		$(BIN)/python -m benchmarks.kernels linear --small --rows 1 16
endif

# Exit status 1: a token was wrong, or an error had no fault to explain it.
soak: folder     ## agents and faults beside a twin that checks every token: an hour
	$(BIN)/python -m loadgen chaos --minutes 60 --output runs

soak-short: setup  ## the same with a tiny model and each fault about once, and a cluster: four minutes
	$(BIN)/python -m loadgen chaos --minutes 2 --every 10 --model random:tiny-llama --output runs
	$(BIN)/python -m loadgen chaos --minutes 1 --every 20 --agents 4 --replicas 2 --moves-per-second 2 \
		--model random:tiny-llama --output runs

# Ten minutes on a GPU machine that may have no network: `make gpu-wheels` here, carry the folder along with the checkout,
# and there `make gpu-check GPU_PYTHON=python3 WHEELS=.wheels`.
GPU_PYTHON ?= $(BIN)/python
WHEELS     ?=

gpu-check:       ## every part of the CUDA path against its target, on a GPU: ten minutes
	$(GPU_PYTHON) -m benchmarks.gpu_check $(if $(WHEELS),--wheels $(WHEELS))

gpu-wheels: setup  ## the small packages that a GPU machine without a network lacks, for its Python 3.12: .wheels
	rm -rf .wheels
	$(BIN)/python -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
		--platform manylinux_2_31_x86_64 --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
		--constraint constraints.txt --dest .wheels --requirement benchmarks/gpu_check/wheels.txt
	du -sh .wheels

gpu-rivals: setup  ## vLLM in two parts that a GPU machine without a network can take: .rivals-1 and .rivals-2
	$(BIN)/python -m benchmarks.gpu_rivals.packing

clean:           ## remove what setup, tests and runs left
	rm -rf $(VENV) .venv-generators .venv-frameworks .venv-agents .wheels .rivals-1 .rivals-2 runs report build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
