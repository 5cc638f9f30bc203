# make demo        see it work: a fleet, one request, its timeline
# make test-fast   the tests that start no processes
# make test        the suite
# make lint        ruff, and mypy in strict mode
# make check       lint and test; .ci/run does the same where nothing is missing that a test needs
# make format      as lint wants it
# make slow        what `make test` leaves out: long tests, random ones with many examples, integration tests in 16 bits
# make proto       the Python of proto/pdserve.proto, anew
# make setup       .venv alone, which all others set up first; PY=python3.12 is its Python, TORCH_INDEX=URL has its torch
# make clean       removes .venv, .cache and build
PY ?= python3
BIN := .venv/bin

PYTEST := $(BIN)/pytest -n 4 --dist worksteal --durations=40 --durations-min=1

# Otherwise each process that a test starts, and each worker, compiles anew what it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test test-fast slow check format lint proto clean

help:
	@sed -n 's/^# \(make .*\)/  \1/p' Makefile

setup: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt
	@$(PY) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "pdserve needs Python 3.11 or newer, this is " + sys.version.split()[0])'
	@$(PY) tests/links.py
	@echo "setting up .venv (a minute or two the first time, most of it torch)"
	@$(PY) -m venv .venv
	@# TORCH_INDEX: a package index, such as that of the builds for CPUs, 0.2 GB each. On Linux the usual one has CUDA's, 3 GB.
	@$(BIN)/pip install --progress-bar on -q $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) -c constraints.txt torch
	@$(BIN)/pip install --progress-bar on -q -c constraints.txt -e '.[dev]'
	@touch $@

demo: setup
	@$(BIN)/pdserve demo

test: setup
	$(PYTEST)

test-fast: setup
	$(PYTEST) -m 'not processes'

slow: setup
	$(BIN)/pytest -m slow --durations=40
	$(PYTEST) -m 'hypothesis and not slow' --hypothesis-profile=thorough
	$(PYTEST) -m 'integration and not slow' --dtype bfloat16
	$(PYTEST) -m 'integration and not slow' --dtype float16

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint test

proto: setup
	scripts/proto

clean:
	rm -rf .venv .cache build *.egg-info
