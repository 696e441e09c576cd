# Everything runs in .venv, which `setup` makes and keeps; nothing is installed outside this folder.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The stamp carries the content of what was installed, so that a changed pin installs again and nothing else does.
STAMP := $(VENV)/.installed-$(shell cat pyproject.toml constraints.txt | cksum | cut -d ' ' -f 1)
MODEL := SmolLM2-135M-Instruct

.PHONY: help setup model demo vllm test test-gpu test-vllm test-long check format docs bench verify clean

help:
	@echo "make demo       set up, fetch a small model, train it on two-digit addition (4 to 8 minutes)"
	@echo "make setup      .venv with pinned packages"
	@echo "make vllm       an environment for engine.backend=vllm, beside .venv (docs/vllm.md)"
	@echo "make test       the quick tests"
	@echo "make test-gpu   engine and learner on an NVIDIA GPU"
	@echo "make test-vllm  what needs that environment"
	@echo "make test-long  whole runs and real kills, and test-vllm"
	@echo "make check      format, lint, types, floors"
	@echo "make format     rewrite files the way check wants them"
	@echo "make docs       write docs/recipe.md, metrics.md and performance.md again from code and figures"
	@echo "make bench      measure, and write benchmarks/results.json (make bench NAME: one of them)"
	@echo "make verify     check, test, test-long, 10,000 simulated runs, chaos on the quickstart (an hour)"
	@echo "make clean      remove caches and .venv (runs/ stays)"

setup: $(STAMP)

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "Cauce needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1)." \
	         "Try: make $(or $(firstword $(MAKECMDGOALS)),setup) PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade -c constraints.txt pip setuptools
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[dev]'
	@rm -f $(VENV)/.installed-*
	@touch $@

model: setup
	$(BIN)/cauce model pull $(MODEL)

demo: model
	$(BIN)/cauce train quickstart

test: setup
	$(BIN)/python -m pytest -q

test-gpu: setup
	$(BIN)/python -m pytest -q -rs -m gpu tests/gpu

# An environment that exists already: make test-vllm CAUCE_VLLM_PYTHON=/path/to/bin/python
VLLM_PYTHON := $(or $(CAUCE_VLLM_PYTHON),.vllm/bin/python)

vllm: setup
	$(BIN)/python -m benchmarks.vllm_environment

test-vllm: model vllm
	PYTHONPATH=src $(VLLM_PYTHON) -m pytest -q -m vllm tests/engine/test_vllm_engine.py
	CAUCE_VLLM_PYTHON=$(VLLM_PYTHON) $(BIN)/python -m pytest -q -m vllm tests/runtime/test_vllm_on_ray.py

test-long: model test-vllm
	$(BIN)/python -m pytest -q -m slow

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: setup
	$(BIN)/python -m cauce.recipe.document
	$(BIN)/python -m cauce.metrics.names > docs/metrics.md
	$(BIN)/python -m benchmarks.page

# `make bench grpo_step_vs_trl`: the words after `bench` name measurements.
ifeq (bench,$(firstword $(MAKECMDGOALS)))
NAMES := $(wordlist 2,$(words $(MAKECMDGOALS)),$(MAKECMDGOALS))
$(eval $(NAMES):;@:)
endif

bench: model
	$(BIN)/python benchmarks/run.py $(NAMES)

# What takes longer than continuous integration has time for: about half an hour more on two cores.
VERIFY := runs/verify-$(shell date +%Y%m%d-%H%M%S)

verify: check test test-long
	$(BIN)/cauce simulate --seeds 10000 --jobs 2
	$(BIN)/cauce chaos quickstart --faults rollout=1 --folder $(VERIFY)
	$(BIN)/cauce chaos quickstart --faults driver=0.6,learner=0.6 \
	    --undisturbed $(VERIFY)/undisturbed --folder $(VERIFY)-driver

clean:
	rm -rf $(VENV) .vllm build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
