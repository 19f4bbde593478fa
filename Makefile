# Everything a person types to work with this project. `make` alone lists it.

PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
# Written when an installation is complete; older than what it depends on, it is done again.
STAMP := $(VENV)/.installed
# Tells `make clean` that this folder was made here and may go.
MADE := $(VENV)/.made-by-make

.DEFAULT_GOAL := help
.PHONY: help run test check setup venv lint types contracts clean

help: ## List these targets
	@echo "make TARGET [PYTHON=python3.12] [ARGS=\"...\"]"
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

run: $(STAMP) ## Rehearse the main job on this machine for one minute; ARGS="--plain --duration 30s" adds options
	@$(BIN)/python -m orchestrator run --rehearse --duration 1 $(ARGS)

test: $(STAMP) lint types contracts ## Run every check and every test; those that need a GPU are skipped without one
	@status=0; \
	$(BIN)/pytest -n auto --dist loadfile -m "not alone and not gpu" || status=$$?; \
	$(BIN)/pytest -m "alone or gpu" || status=$$?; \
	exit $$status

check: $(STAMP) lint types contracts ## Run what is fast: everything but the tests marked ray, torch, gpu and slow
	$(BIN)/pytest -q -n auto --dist loadfile -m "not ray and not torch and not gpu and not slow"

setup: $(STAMP) ## Make .venv and install the project into it, with the versions of constraints.txt

venv: $(BIN)/python ## Make an empty .venv, to put a torch of your choice into it before `make setup`

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy --strict

contracts: $(STAMP)
	$(BIN)/lint-imports

clean: ## Remove .venv (if make made it) and caches; run folders stay
	@if [ -e $(MADE) ]; then rm -rf $(VENV); \
	elif [ -e $(VENV) ]; then rm -f $(STAMP); echo "$(VENV) stays: it was not made by make"; fi
	rm -rf build oom_orchestrator.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find orchestrator workers tests scripts docs -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

$(BIN)/python:
	@command -v $(PYTHON) > /dev/null 2>&1 || { \
	  echo "make: there is no $(PYTHON) here; install Python 3.11 or newer, or name yours: make PYTHON=python3.12" >&2; \
	  exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "make: Python 3.11 or newer is needed, and $(PYTHON) is older; name a newer one: make PYTHON=python3.12" >&2; \
	  exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' > /dev/null 2>&1 || { \
	  echo "make: $(PYTHON) cannot make virtual environments; install the package python3-venv (Debian, Ubuntu)" >&2; \
	  exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	@touch $(MADE)
