# The README's two commands are `make gate` and `make test`; everything runs from the .venv that they create.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
TORCH  := $(VENV)/.torch
RUN    := reports/run-gate

.PHONY: gate test check lint conformance numa-guest pyz clean

gate: $(STAMP)
	$(BIN)/pytest-engram doctor
	$(BIN)/pytest suites -m "correctness or numa or overlap" -q --engram-gate=report --engram-report=$(RUN) --benchmark-json=$(RUN)/run.json

# Measured tests run alone: two cores cannot time anything while they also run other tests, or a second BLAS thread.
test: $(TORCH)
	OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 $(BIN)/pytest tests suites -q -n 2 -m "not slow and not alone and not numa and not overlap and not serving"
	OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 $(BIN)/pytest tests -q -m "alone and not slow"

# conformance first: a guest runs the engine's modules that it fetches; it has run all of tests/vllm.
check: $(TORCH) conformance numa-guest
	$(BIN)/pytest tests suites -q -m slow --ignore=tests/vllm

# 69: no emulator or kernel can be had here; said aloud, and never green by itself.
numa-guest: $(STAMP)
	@$(BIN)/python tests/guest/run.py --out reports/run-numa-guest; code=$$?; \
	if [ $$code -eq 69 ]; then echo "numa-guest: NOT_MEASURED, see above (this is no pass)"; else exit $$code; fi

# The real vLLM modules under Triton's interpreter; the wheels stay in the cache, nothing is installed from them.
conformance: $(TORCH)
	$(BIN)/pip download --quiet --no-deps --only-binary=:all: --dest .cache vllm==0.31.0
	$(BIN)/pip download --quiet --no-deps --only-binary=:all: --dest .cache vllm==0.33.0
	$(BIN)/pip install --quiet --no-deps tokenizers
	CUDA_VISIBLE_DEVICES= TRITON_INTERPRET=1 $(BIN)/pytest-engram conformance vllm@0.31.0 vllm@0.33.0 reference > reports/run-interpreter.md
	CUDA_VISIBLE_DEVICES= TRITON_INTERPRET=1 PYTEST_ENGRAM_CONFORMANCE=1 $(BIN)/pytest tests/vllm -q -m "not gpu"

pyz: $(STAMP)
	$(BIN)/python -c "from pathlib import Path; from pytest_engram.audit import bundle; bundle(Path('dist/pytest-engram-audit.pyz'))"

lint: $(TORCH)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[test]"
	touch $@

# Only the tests need torch and Triton (its interpreter); triton apart, or pip would take another torch for it.
$(TORCH): $(STAMP)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps triton
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
