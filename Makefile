# Every target does its own set-up. Python 3.11 or 3.12: `make PYTHON=/path/to/python3.11 report` names another.
.POSIX:
SHELL = /bin/sh
BIN = .venv/bin
export PYTHON

.PHONY: help setup report test test-unit lint data docs bench faultbench inspectbench compat clean lab-environment test-environment server-environment

help: ## (default) this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' Makefile

setup: ## both environments: .venv (lab) and .venv-server (genuine SGLang on the CPU)
	@$(MAKE) --no-print-directory -j 2 lab-environment server-environment

report: setup ## start SGLang with the tiny drafter, capture, replay, diagnose; leaves an HTML report in runs/
	@$(BIN)/eaglelab demo --out "runs/demo-$$(date +%Y%m%d-%H%M%S)"

test: ## ruff, mypy and all tests, those on the genuine server included (about 25 minutes)
	@$(MAKE) --no-print-directory -j 2 test-environment server-environment
	@$(MAKE) --no-print-directory lint
	@requirements/browser.sh
	CI=true OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests

test-unit: test-environment ## the quick tests only (two minutes)
	$(BIN)/python -m pytest tests/unit

lint: test-environment ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

data: ## rebuild data/ from public-domain text: train target and drafter (20-30 minutes)
	@$(MAKE) --no-print-directory -j 2 test-environment server-environment
	$(BIN)/python data/recipe/make.py

docs: test-environment ## write docs/reference.md from the commands' own help
	$(BIN)/python -m typer eaglelab.cli utils docs --name eaglelab --output docs/reference.md

bench: test-environment ## the long measurements (tests/bench)
	@for bench in tests/bench/*.py; do echo "== $$bench"; $(BIN)/python "$$bench" || exit 1; done

faultbench: ## inject the known faults and diagnose them blind (under 60 minutes; FAST=1: under 8)
	@$(MAKE) --no-print-directory -j 2 test-environment server-environment
	@# one thread: genuine SGLang keeps the other core busy, and two threads of ours would wait for one another
	OMP_NUM_THREADS=1 $(BIN)/python tests/faultbench $${FAST:+--fast}

inspectbench: test-environment ## inspect, diff, diagnose files of Kimi-K2.5's true shapes (each under 2 seconds)
	$(BIN)/python tests/bench/kimi_files.py

compat: lab-environment ## SGLang's releases: fetch the wheels, check that what eaglelab relies on is there
	PYTHONPATH=tests $(BIN)/python -m compat

clean: ## remove environments, caches and runs
	rm -rf .venv .venv-server .cache runs build dist *.egg-info eaglelab_cpu/src/*.egg-info \
	    .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find eaglelab eaglelab_cpu tests data -name __pycache__ -type d -prune -exec rm -rf {} +

lab-environment:
	@requirements/setup.sh lab
test-environment:
	@requirements/setup.sh test
server-environment:
	@requirements/setup.sh server
