# make demo | test | fuzz | bench | zoo | chaos: each sets up what it needs in .venv first
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1

SECONDS ?= 300
SEED ?= $(shell date +%s)

.PHONY: demo test fuzz bench zoo chaos docs clean

demo: $(VENV)/.demo
	$(BIN)/fewshift demo

test: $(VENV)/.dev
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -n 2 --dist loadgroup

fuzz: $(VENV)/.dev
	FUZZ_SECONDS=$(SECONDS) FUZZ_SEED=$(SEED) FUZZ_CASES=0 $(BIN)/python -m pytest -s tests/fuzz

bench: $(VENV)/.bench
	$(BIN)/python benchmarks/core.py
	$(BIN)/python benchmarks/auto.py
	$(BIN)/python benchmarks/small_networks.py
	$(BIN)/python benchmarks/bfloat16.py
	$(BIN)/python benchmarks/methods.py
	$(BIN)/python benchmarks/harness.py
	$(BIN)/python benchmarks/training.py
	$(BIN)/python benchmarks/whitening.py
	$(BIN)/python benchmarks/segmentation.py
	$(BIN)/python benchmarks/trust.py
	$(BIN)/python benchmarks/shift.py
	$(BIN)/python benchmarks/predict.py
	$(BIN)/python benchmarks/sites.py
	$(BIN)/python benchmarks/deploy.py

zoo: $(VENV)/.bench
	$(BIN)/python benchmarks/zoo.py --workers 2

chaos: $(VENV)/.dev
	$(BIN)/python -m tests.chaos $(CHAOS)

docs: $(VENV)/.base
	$(BIN)/python -m fewshift.methods.catalog > docs/methods.md

$(VENV)/.base: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable .
	touch $@

$(VENV)/.demo: $(VENV)/.base
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[demo]"
	touch $@

$(VENV)/.bench: $(VENV)/.base
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[demo,onnx,parquet,segmentation]"
	touch $@

$(VENV)/.dev: $(VENV)/.base
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info
