# `make demo` and `make test` do everything on a fresh machine with Python 3.11 and make.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
DEMO   ?= preftune-demo

export HF_HUB_DISABLE_TELEMETRY := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: demo test test-all test-gpu bench-head lint types lock clean help

help:
	@sed -n 's/^## //p' Makefile

## make demo      install, fetch the demo model and data once, train KTO and DPO, write $(DEMO)/report.html
demo: $(STAMP)
	$(BIN)/preftune demo --output-dir $(DEMO)

## make test      install, then lint, types and every test that is not marked slow
test: lint types
	$(BIN)/pytest -m "not slow and not gpu" -n 2 --cov --cov-report=term:skip-covered

## make test-all  as test, with the slow tests
test-all: lint types
	$(BIN)/pytest -m "not gpu" -n 2 --cov --cov-report=term:skip-covered

## make test-gpu  the checks that need a CUDA device
test-gpu: $(STAMP)
	$(BIN)/pytest -m gpu

## make bench-head  what the head costs, ours and others' (an hour; peers where they are installed)
bench-head: $(STAMP)
	$(BIN)/python bench/head.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

## make lock      write constraints.txt anew from what the environment holds
lock: $(STAMP)
	$(BIN)/python -m pip list --format=freeze --exclude preftune --exclude pip --exclude setuptools \
	  | sed 's/+cpu$$//' | (echo "# Exact versions that CI and the two set-up commands install. Regenerate with: make lock"; cat) > constraints.new
	mv constraints.new constraints.txt

## make clean     remove the environment and what runs wrote here (the cache in your home stays)
clean:
	rm -rf $(VENV) $(DEMO) runs .mypy_cache .ruff_cache .pytest_cache

# The stamp makes a second run start at once; a change of either file installs again.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "preftune needs Python 3.11 or newer; run: make PYTHON=python3.11 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $(STAMP)
