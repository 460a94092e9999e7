# Every target makes its own environment first: `make demo` and `make test` are all a fresh machine needs.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint docs bench clean

demo: .venv/ready
	$(BIN)/vssm demo

test: .venv/ready-dev
	$(BIN)/python -m pytest

lint: .venv/ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

docs: .venv/ready-dev
	$(BIN)/python -m pytest -q tests/test_readme.py vssm

bench: .venv/ready-dev
	$(BIN)/vssm bench scan
	$(BIN)/vssm bench generate

clean:
	rm -rf .venv demo dist .pytest_cache .ruff_cache .hypothesis

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

.venv/ready-dev: .venv/ready
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@
