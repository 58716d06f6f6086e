# Leyden from a bare clone: needs only Python 3.11+ and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help train test lint board clean

help: ## show this help
	@echo "Usage: make TARGET [ARGS=\"...\"]"
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1|/' | column -t -s '|'
	@echo
	@echo 'Example: make train ARGS="experiment=vision trainer.max_epochs=3"'

# The environment is made again when the dependencies change.
$(BIN)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Leyden needs Python 3.11 or later; name one: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	@touch $@

train: $(BIN)/.installed ## train an experiment (the default: regression); ARGS are overrides
	$(BIN)/python train.py $(ARGS)

test: $(BIN)/.installed ## run all tests; ARGS go to pytest
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal $(ARGS)

lint: $(BIN)/.installed ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

board: $(BIN)/.installed ## show all runs in TensorBoard
	$(BIN)/tensorboard --logdir outputs $(ARGS)

clean: ## remove the environment and caches (never outputs)
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache
