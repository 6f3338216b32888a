# Two commands do all the set-up: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TEST_ARGS ?= -n 2

.PHONY: demo test lint wheel-check bench clean help

help:
	@echo "make demo         install into .venv and run the embedded demonstration"
	@echo "make test         install with the extras app, corruptions, dense and test, and run the whole suite (TEST_ARGS='-k knn' narrows it)"
	@echo "make lint         ruff, pyright, import contracts"
	@echo "make wheel-check  build the wheel and run ibot-eval from it in an empty folder"
	@echo "make bench        speed and memory, as ratios within one run"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "ibot-eval needs Python 3.11 or newer; $(PYTHON) is `$(PYTHON) --version 2>&1`. Try: make PYTHON=python3.12"; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[app,corruptions,dense,test]'
	@touch $@

demo: $(VENV)/.installed
	$(BIN)/ibot-eval knn

test: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(TEST_ARGS)

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

# Needs nothing but the base installation, so that a dependency that only the tests install is found out here.
wheel-check: $(VENV)/.installed
	rm -rf build/wheel
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir build/wheel .
	$(BIN)/python tests/wheel_check.py build/wheel

bench: $(VENV)/.installed-test
	$(BIN)/python tests/benchmarks/run.py

clean:
	rm -rf $(VENV) build dist runs
