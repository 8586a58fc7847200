# Make .venv and do the project's jobs in it. `make help` lists them.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
# test processes at once
JOBS ?= 2
# make test TORCH=2.14.1: another PyTorch, in an environment of its own; else the one of constraints.txt
TORCH ?=
VENV := .venv$(TORCH:%=-torch%)
CONSTRAINTS := $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help run test test-all bench pictures check lint types arrows docs wheel clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1	/p' $(MAKEFILE_LIST) | expand -t 10

run: $(VENV)/examples ## the main job: train and check a network on four virtual IPUs
	$(BIN)/python -m examples.digits

test: $(VENV)/dev ## the tests, in about 15 minutes on two quiet cores
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not slow" --hypothesis-profile=ci

test-all: $(VENV)/dev ## all tests with many examples, into build/test-all.json
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal --hypothesis-profile=all --timeout=3600 \
		--json=build/test-all.json

bench: $(VENV)/dev ## the benchmarks, timed twice, into build/bench.json
	$(BIN)/python -m benchmarks --runs=2 --json=build/bench.json

check: lint types arrows test docs wheel ## everything that must pass before a change is merged

pictures: $(VENV)/dev ## draw the pictures of the guide and the README anew
	$(BIN)/python -m tests.docs.guide pictures

lint: $(VENV)/dev ## style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/dev ## types
	$(BIN)/mypy

arrows: $(VENV)/dev ## who may import whom
	$(BIN)/lint-imports --no-logo

docs: $(VENV)/dev ## the guide as a site, with the reference, in build/site; links are checked
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "open build/site/index.html; for its search: $(BIN)/python -m http.server -d build/site"

wheel: $(VENV)/dev ## build sdist and wheels, look inside, try the wheels outside the checkout
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m build --wheel --outdir dist packaging/poptorch
	$(BIN)/python -m build --wheel --outdir dist packaging/horovod_compat
	$(BIN)/python packaging/check_archives.py dist
	$(BIN)/python packaging/try_wheel.py dist

clean: ## remove what was built, but keep .venv and its like
	rm -rf build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	rm -rf packaging/*/build packaging/*/*.egg-info
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

# .venv/<extra> is an empty file that says: this extra of pyproject.toml is installed
$(VENV)/examples $(VENV)/dev: $(VENV)/%: pyproject.toml packaging/poptorch/pyproject.toml constraints.txt | $(BIN)/python
	$(if $(TORCH),echo "torch==$(TORCH)" > $(CONSTRAINTS))
	$(BIN)/python -m pip install --constraint $(CONSTRAINTS) --editable ".[$*]"
	$(BIN)/python -m pip install --no-deps ./packaging/poptorch
	@touch $@

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; make PYTHON=/its/path ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
