# The README's two commands are `make gate` and `make test`; everything runs from the .venv that they create.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: gate test check lint conformance numa-guest clean

gate: $(STAMP)
	$(BIN)/pytest-engram doctor
	$(BIN)/pytest -m "correctness or numa or overlap" --engram-gate=report --benchmark-json=reports/run-gate/run.json --engram-report=reports/run-gate -q

# Measured tests run alone: two cores cannot time anything while they also run other tests.
test: $(STAMP)
	$(BIN)/pytest tests suites -q -n 2 -m "not slow and not alone and not numa and not overlap and not serving"
	$(BIN)/pytest tests -q -m "alone and not slow"

check: $(STAMP)
	$(BIN)/pytest tests suites -q -m "slow"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[test]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
