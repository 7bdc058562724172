# demo   the whole story: two students distilled, measured, and a page that shows it
# test   the tests
# check  what continuous integration runs: lint, format, types, every test but the slow evidence
# bench  ratios, measured in one run
# chaos  runs that are killed, stopped and starved, and must go on bit for bit; a quarter of an hour
#
# Each target makes the virtual environment itself when it is missing, and renews it when the
# dependencies change. Another interpreter: make demo PYTHON=python3.12

PYTHON ?= python3
VENV ?= .venv
OUT ?= runs/demo

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo test check format bench chaos

help:
	@sed -n "1,/^$$/s/^# \{0,1\}//p" Makefile

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("codmd needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": name another with PYTHON=...")'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,dev]'
	@touch $@

demo: $(INSTALLED)
	$(BIN)/codmd demo --out $(OUT)

test: $(INSTALLED)
	$(BIN)/python -m pytest -q -m "not wheel and not slow"

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -m "not slow"

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED)
	$(BIN)/python -m bench

chaos: $(INSTALLED)
	$(BIN)/python -m bench.chaos --report docs/reliability.md
