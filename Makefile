# Two commands do everything on a fresh machine: `make run` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
JOBS   ?= 2

.PHONY: run test lint clean
.DEFAULT_GOAL := run

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "fusionreg needs Python 3.11 or later; set PYTHON=…"; exit 1; }
	@command -v g++ >/dev/null || command -v clang++ >/dev/null || echo "warning: no C++ compiler; install g++ or clang++ for the simulator"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e '.[all]'
	@touch $@

# Fusions of every family in the simulator, then two real models end to end.
run: $(STAMP)
	$(BIN)/python examples/run_all.py

test: $(STAMP) lint
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
