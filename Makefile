# Everything a newcomer needs: `make serve` and `make test`. Run `make` for the list.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(shell command -v python3.11 || echo python3)
DEVICE ?= $(shell if command -v nvidia-smi >/dev/null 2>&1; then echo gpu; else echo cpu; fi)
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-deps
# PyTorch keeps its CPU wheels on an index of its own.
TORCH_INDEX := https://download.pytorch.org/whl/cpu
TORCH_WHEELS ?= $(TORCH_INDEX)/torch
VENV_STAMP := .venv/.made
RUN_STAMP := .venv/.installed-$(DEVICE)
DEV_STAMP := .venv/.installed-dev-$(DEVICE)

.PHONY: help serve test test-long prepare lint types layers unit format lock clean

help: ## list the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

serve: $(RUN_STAMP) ## install what is missing, prepare the models, start the service on 127.0.0.1:8000
	@$(BIN)/foreword serve

test: $(DEV_STAMP) prepare lint types layers unit ## install what is missing, then lint, types, layering and all tests

prepare: $(RUN_STAMP) ## prepare the default models once
	@$(BIN)/foreword prepare

lint: $(DEV_STAMP) ## style of code and Dockerfile
	@echo "lint: a few seconds"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/hadolint --config docker/.hadolint.yaml docker/Dockerfile

types: $(DEV_STAMP) ## static types
	@echo "types: about a minute the first time"
	@$(BIN)/mypy

layers: $(DEV_STAMP) ## direction of imports
	@echo "layers: a few seconds"
	@$(BIN)/lint-imports

unit: $(DEV_STAMP) ## all tests
	@echo "tests: some minutes; the real engine is started once"
	@$(BIN)/python -m pytest

test-long: $(DEV_STAMP) prepare ## what takes too long for `make test`; the result goes to docs/test-long.txt
	@echo "long tests: some minutes; vLLM's own server is started once"
	@{ date -u +%F; $(BIN)/python -m pytest -m long --no-header -v --durations=5; } 2>&1 | sed "s|$(CURDIR)/||g" | tee docs/test-long.txt

format: $(DEV_STAMP) ## rewrite the code in the project's style
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .

# The lists are made for CPython 3.11 on Linux x86_64, with hashes.
LOCK := uv pip compile pyproject.toml --quiet --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
	--generate-hashes --no-header --no-annotate --group build
NO_TRITON := --override <(echo "triton ; sys_platform == 'never'")
lock: ## resolve the lists anew (needs uv and, for the CPU, the torch wheel index)
	$(LOCK) $(NO_TRITON) --extra cpu --no-emit-package torch --find-links $(TORCH_WHEELS) -o requirements-cpu.txt
	$(LOCK) --extra gpu -o requirements-gpu.txt
	$(LOCK) $(NO_TRITON) --extra cpu --find-links $(TORCH_WHEELS) --group dev -c requirements-cpu.txt --quiet -o .lock-dev
	@python3 -c "import re; \
	blocks = lambda f: re.split(r'\n(?=\S)', open(f).read().strip()); \
	have = set(blocks('requirements-cpu.txt')); \
	open('requirements-dev.txt', 'w').write('\n'.join(b for b in blocks('.lock-dev') if b not in have and not b.startswith('torch==')) + '\n')"
	@rm .lock-dev

clean: ## remove the virtual environment and caches
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

VENV_WORKS := $(BIN)/python -c 'import sys; sys.version_info[:2] == (3, 11) or sys.exit("it is Python " + sys.version); \
	sys.prefix == sys.base_prefix and sys.exit("it is no environment of its own")' && $(BIN)/python -m pip --version
# Only a whole .venv gets its stamp: one that was broken off is made anew, and one that does not work is not kept.
$(VENV_STAMP):
	@{ $(VENV_WORKS); } >/dev/null 2>&1 || { \
		echo "creating .venv with $(PYTHON)"; \
		rm -rf .venv; \
		why=$$( { $(PYTHON) -m venv .venv && $(VENV_WORKS); } 2>&1 ) || { \
			rm -rf .venv; \
			echo "$$why"; \
			echo "Python 3.11 with venv and pip is needed; name it with: make PYTHON=/path/to/python3.11"; \
			exit 1; \
		}; \
	}
	@touch $@

$(RUN_STAMP): requirements-torch-cpu.txt requirements-$(DEVICE).txt pyproject.toml | $(VENV_STAMP)
	@echo "installing the locked list for $(DEVICE), about 3 minutes the first time"
	@start=$$SECONDS; \
	if [ $(DEVICE) = cpu ]; then \
		$(PIP) --require-hashes -r requirements-torch-cpu.txt 2>/dev/null \
			|| $(PIP) --require-hashes --index-url $(TORCH_INDEX) -r requirements-torch-cpu.txt; \
	fi; \
	$(PIP) --require-hashes -r requirements-$(DEVICE).txt; \
	$(PIP) --no-build-isolation -e .; \
	touch $@; echo "installed in $$((SECONDS - start)) s"

$(DEV_STAMP): $(RUN_STAMP) requirements-dev.txt
	@echo "installing the development tools, about 20 seconds the first time"
	@$(PIP) --require-hashes -r requirements-dev.txt
	@touch $@
