# Each target makes its own environment first, and again whenever pyproject.toml or constraints.txt changed.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready

# Tests and demo run tiny models: one thread is faster than many, and leaves the machine usable.
export OMP_NUM_THREADS ?= 1

.PHONY: help demo test test-all check lint types format clean

help:
	@echo "make demo       train handwritten digits, print the summary and the TensorBoard command"
	@echo "make test       the tests, some minutes on two cores"
	@echo "make test-all   the slow ones as well: exhaustive resumes, compilers, whole trainings"
	@echo "make check      ruff, mypy and the tests: what must pass before a change lands"
	@echo "make format     let ruff rewrite the sources"

$(READY): pyproject.toml constraints.txt
	@test -x $(PY) || { echo "making $(VENV) (a few minutes the first time)"; $(PYTHON) -m venv $(VENV); }
	@$(PY) -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(READY)
	@$(PY) -m safetrain run examples/configs/digits.yaml

test: $(READY)
	$(PY) -m pytest -m "not slow"

test-all: $(READY)
	$(PY) -m pytest

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(READY)
	$(PY) -m mypy

check: lint types test

format: $(READY)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build dist
