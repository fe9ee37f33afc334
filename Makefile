# What each target does is also written out as plain commands in README.md.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
RESULTS ?= results/local

.PHONY: install quickstart test test-fast lint

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else f"Python 3.11 or newer is needed; given {sys.version.split()[0]}: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	touch $@

quickstart: install
	$(BIN)/ddtree-bench sweep sweeps/quickstart.toml --results $(RESULTS)
	$(BIN)/ddtree-bench compare linear vs tree --results $(RESULTS)

test: install lint
	$(BIN)/python -m pytest -m 'not gpu' -p no:cacheprovider

test-fast: install
	$(BIN)/python -m pytest

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
