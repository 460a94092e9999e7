# Every target makes its own environment first: `make demo` and `make test` are all a fresh machine needs.
PYTHON ?= python3
BIN := .venv/bin
PAGE := docs/browser/built/browser

.PHONY: demo test lint lowest docs site release bench clean

demo: .venv/ready
	$(BIN)/vssm demo

# One file at a time on each of two processes, each with one thread: more would wait for each other.
test: .venv/ready-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

lint: .venv/ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	@# Pyright finds an installed package through the python on the path.
	PATH="$(CURDIR)/$(BIN):$$PATH" pyright --verifytypes vssm --ignoreexternal --outputjson | $(BIN)/python -c "import json, sys; \
		score = json.load(sys.stdin)['typeCompleteness']['completenessScore']; \
		print(f'{score:.1%} of the public names are typed'); assert score >= 0.95"

# The lowest versions that pyproject.toml declares, in an environment of their own (7 GB with torch's CUDA libraries).
lowest: pyproject.toml constraints-lowest.txt
	$(PYTHON) -m venv --clear .venv-lowest
	.venv-lowest/bin/python -m pip install --quiet --constraint constraints-lowest.txt \
		--editable '.[serve,hub,forecast]'
	.venv-lowest/bin/python tests/smoke.py

docs: .venv/ready-dev
	$(BIN)/python docs/reference.py
	$(BIN)/python docs/results_page
	$(BIN)/python -m pytest -q tests/test_readme.py vssm

# The site, from the pages, notebooks and docstrings, in site/. Warnings are errors.
site: .venv/ready-dev
	@if command -v npm >/dev/null; then $(MAKE) --no-print-directory $(PAGE)/index.html; \
		else echo "npm is missing: the site comes without the page that runs in the browser"; fi
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs site
	@echo "python -m http.server -d site    # then open http://127.0.0.1:8000/; most pages also open as files: site/index.html"

# The page that fills digits in the browser; a minute.
$(PAGE)/index.html: docs/browser/export.py docs/browser/local.js vssm/serve/page.html \
		vssm/runs/pretrained/mnist-any-small/weights.safetensors
	$(BIN)/python docs/browser/export.py $(PAGE)

# All of a release but the upload: a wheel and a source archive in dist/, each installed into an empty environment and tried.
release: .venv/ready-dev
	rm -rf dist .venv-release
	$(BIN)/python -m build --quiet
	$(BIN)/python -c "import pathlib; size = sum(p.stat().st_size for p in pathlib.Path('dist').glob('*.whl')); \
		print(f'wheel: {size:,} bytes'); assert size <= 15_000_000"
	for archive in dist/*.whl dist/*.tar.gz; do \
		$(PYTHON) -m venv --clear .venv-release && \
		.venv-release/bin/python -m pip install --quiet --constraint constraints.txt $$archive && \
		(cd dist && ../.venv-release/bin/python ../tests/smoke.py) || exit 1; \
	done

bench: .venv/ready-dev
	$(BIN)/vssm bench scan
	$(BIN)/vssm bench generate

clean:
	rm -rf .venv .venv-lowest .venv-release demo dist site docs/browser/built .pytest_cache .ruff_cache .hypothesis

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

.venv/ready-dev: .venv/ready
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@
