# Everything below needs Python 3.11 or newer and make; the rest is installed into .venv.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/uv pip install --quiet --python $(BIN)/python
READY := .venv/.ready
DEV := .venv/.dev

.PHONY: help install demo test test-all test-lowest lint bench bench-gpu results docs site clean

help:
	@echo "make demo     RaTP and source-only on the embedded stream, with a report (2 to 3 minutes)"
	@echo "make test     the quick tests (under 6 minutes on two cores)"
	@echo "make test-all the quick tests, then the slow ones: every method, faults, kills, processes, Ray"
	@echo "make test-lowest  a few tests and the demo with the lowest versions in pyproject.toml (downloads up to 4 GB)"
	@echo "make lint     ruff (lint and format) and mypy (strict)"
	@echo "make bench    time and memory of the demo, start times; the plain reference against the fast path; HTTP"
	@echo "make bench-gpu  speed of steps and whole commands on a GPU, against the figures that were kept last"
	@echo "make results  all methods on the demo with three seeds (hours), kept in results/, tables and figures from it,"
	@echo "              and the table of faults, whose tests it runs"
	@echo "make docs     the generated parts of README and docs, and REPRODUCIBILITY.md; then the site"
	@echo "make site     the documentation site, in build/site/index.html"
	@echo "make clean    remove the virtual environment, runs and caches"

# Without an NVIDIA GPU, uv takes the small CPU build of torch, from an index that it knows itself. PyPI has only the build
# with CUDA, which works without a GPU too.
$(READY): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "ratp needs Python 3.11 or newer; set PYTHON=python3.11"; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check uv==0.13.7
	$(INSTALL) --torch-backend=auto --requirement requirements.txt 2> .venv/torch.log || \
	  { echo "No torch for this machine's devices ($$(head -1 .venv/torch.log)); taking PyPI's, which is larger."; \
	    $(INSTALL) --requirement requirements.txt; }
	$(INSTALL) --no-deps --editable .
	@touch $(READY)

$(DEV): $(READY) requirements-dev.txt
	$(INSTALL) --requirement requirements-dev.txt
	@touch $(DEV)

install: $(READY)

demo: $(READY)
	$(BIN)/ratp demo

# Python starts hundreds of times here; without byte code, every start compiles all it imports.
test test-all: export PYTHONDONTWRITEBYTECODE =

test: $(DEV)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

# The quick tests first, then only the others: each runs once.
test-all: test
	$(BIN)/python -m pytest -n 2 --dist loadfile -m slow

# Libraries this old use what newer ones deprecate.
LOWEST := .venv/lowest
test-lowest: $(DEV)
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(LOWEST)
	$(BIN)/uv pip install --quiet --python $(LOWEST)/bin/python --resolution lowest-direct --editable .
	$(BIN)/uv pip install --quiet --python $(LOWEST)/bin/python pytest hypothesis
	$(LOWEST)/bin/python -m pytest -m "not slow" -W ignore::DeprecationWarning tests/data/test_demo.py \
	  tests/cli/test_start.py tests/cli/test_messages.py tests/reports/test_plots.py tests/reports/test_tables.py
	$(LOWEST)/bin/ratp demo --epochs 1 --steps 5 --quiet --out $(LOWEST)/demo

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# As ratp has it: here torch is loaded before it.
bench: export GOMP_SPINCOUNT ?= 1000
bench: $(DEV)
	$(BIN)/python benchmarks/demo.py
	$(BIN)/python benchmarks/reference_vs_fast.py
	$(BIN)/python benchmarks/serve.py

# The headline figures of a GPU, against those that were kept last.
bench-gpu: $(DEV)
	$(BIN)/python benchmarks/headline.py

results: $(READY)
	$(BIN)/ratp run demo -m all --seed 2022 --seed 2023 --seed 2024 --no-reuse-source --out runs/methods
	$(BIN)/ratp report runs/methods --export results/demo --quiet
	$(BIN)/ratp demo --seed 2022 --seed 2023 --seed 2024 --out runs/results
	$(BIN)/ratp report runs/results --export results/demo --quiet
	$(BIN)/python tools/docs.py
	$(BIN)/python tools/figures.py
	$(BIN)/python tools/reliability.py

docs: $(DEV)
	$(BIN)/python tools/docs.py
	$(BIN)/python tools/reproducibility.py
	$(MAKE) site

SITE_READY := .venv/.site
$(SITE_READY): requirements-docs.txt $(READY)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --requirement requirements-docs.txt
	@touch $(SITE_READY)

site: $(SITE_READY)
	$(BIN)/python tools/build_site.py

clean:
	rm -rf .venv runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
