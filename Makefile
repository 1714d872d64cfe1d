# Companion: the two commands are `make lab` and `make test`; `make help` lists the rest.
#
# Variables: PORT=8888        where JupyterLab listens
#            NO_BROWSER=1     only print the address
#            TORCH_INDEX=URL  take torch from there (chosen by what is found here otherwise)
#            WORK=work        where your copies of the notebooks are
#            NOTEBOOKS=...    which notebooks `make notebooks`, `nbval` and `run` take
#            LIST=measure     which list `make mutants` takes (all of them otherwise)

PORT ?= 8888
WORK ?= work
NOTEBOOKS ?= $(sort $(wildcard notebooks/*.ipynb))
PYTHON := .venv/bin/python
export PATH := $(CURDIR)/.venv/bin:$(PATH)

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup lab test test-all unit nbval browser slow lint notebooks run warm mutants some-mutants clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' Makefile

setup: ## install what the lock says into .venv (the other targets call it)
	@sh tools/setup.sh

lab: setup ## open JupyterLab on the course (PORT=, NO_BROWSER=1)
	@exec $(PYTHON) -m tools.lab --port $(PORT) --work "$(WORK)" $(if $(NO_BROWSER),--no-browser)

test: unit nbval browser ## unit tests, all notebooks, one pass in a browser

test-all: test lint some-mutants slow ## all of that, and what takes minutes

unit: setup ## unit tests
	$(PYTHON) -m pytest tests

nbval: setup ## run every notebook as a test
	$(PYTHON) -m pytest -p tools.nbval_fixes --nbval-lax --nbval-current-env --nbval-cell-timeout=300 $(NOTEBOOKS)

browser: setup ## notebook 01 in JupyterLab, and the timeline, in a real browser
	$(PYTHON) -m pytest -rs -m browser tests/browser

slow: setup ## tests that take minutes
	$(PYTHON) -m pytest -m slow tests

lint: setup ## ruff and mypy
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

notebooks: setup ## run the notebooks and store their normalised outputs
	$(PYTHON) -m tools.notebooks store $(NOTEBOOKS)

run: setup ## run the notebooks without JupyterLab, HTML in build/
	$(PYTHON) -m tools.notebooks html $(NOTEBOOKS)

warm: setup ## prepare what a room full of learners would otherwise wait for
	@$(PYTHON) -m tools.lab --prepare-only --work "$(WORK)"

some-mutants: setup ## as many of them as 20 minutes allow, others each day
	$(PYTHON) -m tools.mutants --tests-pass --minutes 20

mutants: setup ## planted faults, each of which must make a test fail
	$(PYTHON) -m tools.mutants $(LIST)

clean: ## remove what runs leave behind (not .venv, not your work/)
	rm -rf build runs notebooks/runs notebooks/solutions/runs data/cache .pytest_cache .mypy_cache .ruff_cache *.egg-info
	find companion tests tools benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
