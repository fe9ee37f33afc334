# What each target does is also written out as plain commands in README.md.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
RESULTS ?= results/local
PYTEST_ARGS ?=

.PHONY: install quickstart test test-fast lint commit-file

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
	$(BIN)/python -m pytest -m 'not gpu' -p no:cacheprovider $(PYTEST_ARGS)

test-fast: install
	$(BIN)/python -m pytest

# For a copy that travels without .git: provenance then names the commit it was made from.
commit-file:
	printf '{"commit": "%s", "is_dirty": %s}\n' "$$(git rev-parse HEAD)" "$$(git diff --quiet HEAD && echo false || echo true)" > ddtree_bench/_commit.json

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
