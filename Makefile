# make demo: see it work · make test: the whole suite · make check: lint, types, tests. All set up .venv first.
PY ?= python3
BIN := .venv/bin

.PHONY: setup demo test check lint proto clean

setup: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt
	@$(PY) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "pdserve needs Python 3.11 or newer, this is " + sys.version.split()[0])'
	@echo "setting up .venv (a minute or two the first time, most of it torch)"
	@$(PY) -m venv .venv
	@$(BIN)/pip install --progress-bar on -q -c constraints.txt torch
	@$(BIN)/pip install --progress-bar on -q -c constraints.txt -e '.[dev]'
	@touch $@

demo: setup
	@$(BIN)/pdserve demo

test: setup
	$(BIN)/pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint test

proto: setup
	scripts/proto

clean:
	rm -rf .venv build *.egg-info
