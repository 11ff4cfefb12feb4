# The README's two commands, `make demo` and `make test`, do all the set-up themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Without an NVIDIA driver one fixed torch is enough for everything but the GPU tests.
TORCH := $(if $(shell command -v nvidia-smi 2>/dev/null),torch>=2.11,torch==2.13.0)
RUN ?= runs/demo

.PHONY: demo test test-fast test-gpu lint format sizes clean help

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

demo: $(VENV)/.run  ## train the tiny model in FP8 on the text that ships with Python
	rm -rf $(RUN)
	$(BIN)/graphrt train --preset tiny --out $(RUN) --check-parity 4

test: $(VENV)/.test  ## all tests this machine can run (GPU tests skip themselves without one)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal

test-fast: $(VENV)/.test  ## the tests without the slow ones
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal -m "not slow"

test-gpu: $(VENV)/.test  ## the GPU tests alone, one process
	$(BIN)/python -m pytest -m gpu

lint: $(VENV)/.dev  ## ruff and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(VENV)/.dev  ## let ruff rewrite the tree
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

sizes:  ## lines per file, for information
	@git ls-files 'graphrt/*' 'tests/*' 'profiles/*.py' | xargs wc -l | sort -rn

clean:  ## remove the environment and what the tests and the demo wrote
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis *.egg-info $(RUN)

$(VENV)/.torch:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 12) else "graphrt needs Python 3.11 or 3.12, and $(PYTHON) is %d.%d. Run make PYTHON=python3.11 ..." % v)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	touch $@

$(VENV)/.run: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet -e '.[plot]'
	touch $@

$(VENV)/.test: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet -e '.[test,hf]'
	touch $@ $(VENV)/.run

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $@ $(VENV)/.test $(VENV)/.run
