# `make demo` and `make test` each work alone on a fresh machine: they make .venv when it is missing.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Many processes import the same files: they keep the compiled form, and one thread each.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest --quiet \
	--numprocesses 2 --dist loadgroup

.PHONY: demo test check format oldest pytest docs wheel bench screenshots clean help

help: ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

demo: $(STAMP) ## trace an example GPT on a simulated 8-device mesh: a table, JSON, a page to open
	$(BIN)/torchspmd trace examples/train_gpt_tp.py --world-size 8 --out demo-report.json \
		--html demo-page.html
	@echo "Open the page in a browser: file://$(CURDIR)/demo-page.html"

test: ## everything CI runs
	$(MAKE) --jobs 2 check pytest

check: $(STAMP) ## format, lint, types, import contracts, spelling, the example's lock
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/typos
	$(BIN)/torchspmd check examples/train_gpt_tp.lock

pytest: $(STAMP)
	$(PYTEST) src tests

# The tests of the package alone: checks, pages and wheels are those of `make test`. Its wheel
# of torch may bring the libraries of CUDA, 5 GB.
OLDEST := 2.11.0
.venv-oldest/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-oldest
	grep -v '^torch==' constraints.txt > .venv-oldest/constraints.txt
	.venv-oldest/bin/python -m pip install --quiet --constraint .venv-oldest/constraints.txt \
		torch==$(OLDEST) --editable '.[dev]'
	touch $@

oldest: .venv-oldest/.installed ## the tests with the oldest torch that is supported
	CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 .venv-oldest/bin/python -m pytest --quiet \
		--numprocesses 2 --dist loadgroup src tests

format: $(STAMP) ## rewrite files in the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(VENV)/.installed-docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

docs: $(VENV)/.installed-docs ## the documentation as pages in site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html, or for its search: python -m http.server -d site"

wheel: $(STAMP) ## the package as a wheel in dist/
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

bench: $(STAMP) ## the communication-tracing benchmarks, as a table and JSON
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/bench_trace_overhead.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/bench_trace_large.py

screenshots: $(STAMP) ## pictures of the page for the documentation; needs chromium
	$(BIN)/python tests/browser/screenshots.py docs/images

clean: ## remove what make created
	rm -rf $(VENV) .venv-oldest .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache \
		site demo-report.json demo-page.html
