# Every target makes its own environment first: `make demo` and `make test` are all a fresh machine needs.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint lowest docs bench clean

demo: .venv/ready
	$(BIN)/vssm demo

# One file at a time on each of two processes, each with one thread: more would wait for each other.
test: .venv/ready-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

lint: .venv/ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# The lowest versions that pyproject.toml declares, in an environment of their own (7 GB with torch's CUDA libraries).
lowest: pyproject.toml constraints-lowest.txt
	$(PYTHON) -m venv --clear .venv-lowest
	.venv-lowest/bin/python -m pip install --quiet --constraint constraints-lowest.txt \
		--editable '.[serve,hub,track,forecast]'
	.venv-lowest/bin/python tests/smoke.py

docs: .venv/ready-dev
	$(BIN)/python docs/reference.py
	$(BIN)/python docs/results_page
	$(BIN)/python -m pytest -q tests/test_readme.py vssm

bench: .venv/ready-dev
	$(BIN)/vssm bench scan
	$(BIN)/vssm bench generate

clean:
	rm -rf .venv .venv-lowest demo dist .pytest_cache .ruff_cache .hypothesis

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

.venv/ready-dev: .venv/ready
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@
