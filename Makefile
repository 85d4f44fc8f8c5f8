# Everything a developer or a first-time user runs. `make` alone lists the targets.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
MODEL  ?= smollm2-135m-instruct
STAMP  := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup model serve demo test lint bench bench-kv bench-breakpoints clean

help:            ## list the targets
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/'

setup: $(STAMP)  ## make .venv with everything that Djinn and its tests need

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Djinn needs Python 3.11 or newer; try make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

model: setup     ## fetch the default model
	$(BIN)/djinn models pull $(MODEL)

serve: model     ## serve the default model on http://127.0.0.1:8000
	$(BIN)/djinn serve --model $(MODEL)

demo: model      ## serve a real model, drive a dozen agents against it, print the report
	$(BIN)/python -m loadgen.demo --model $(MODEL) --output runs

test: model      ## run the tests
	$(BIN)/python -m pytest

lint: setup      ## style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: model     ## decode and time to first token beside vLLM's CPU build and Transformers
	$(BIN)/python -m benchmarks.peers

bench-kv: model  ## KV moves beside memcpy, and what a session that was away waits for
	$(BIN)/python -m benchmarks.kv

bench-breakpoints: model  ## what pausing, resuming and steering cost, and what they cost others
	$(BIN)/python -m benchmarks.breakpoints

clean:           ## remove what setup, tests and runs left
	rm -rf $(VENV) .venv-vllm runs build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
