# make demo and make test do everything from a fresh clone. Variables: PYTHON, SYSTEM=1, HOROVOD=0 (docs/install.md); ARGS.
SHELL := /bin/bash
PYTHON ?= python3
ARGS ?=
export PYTHON SYSTEM HOROVOD
# What the extra `docs` of pyproject.toml names.
DOCS = $(shell sed -n 's/^docs = \[\(.*\)\]/\1/p' pyproject.toml | tr -d ',')
# The project's own python, mpirun and mpicc, whether or not its virtual environment is activated.
export PATH := $(CURDIR)/.venv/bin:$(PATH)
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
# Ranks are many processes; without byte code each of them compiles every module anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup horovod demo lint test test-all docs slurm bench clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 16

setup:  ## everything distseg needs, into .venv; the first time some minutes, then at once
	@install/setup.sh

horovod:  ## install Horovod anew: after a failed build, or with other HOROVOD_... settings
	@rm -f .venv/.stamps/horovod .venv/.stamps/horovod-failed
	@install/setup.sh

demo: setup  ## train, predict and evaluate on a real satellite image, on this machine
	@.venv/bin/python -m distseg.cli.demo $(ARGS)

lint: setup  ## style, format and types of the code
	@.venv/bin/ruff check --quiet
	@.venv/bin/ruff format --check --quiet
	@.venv/bin/mypy --no-error-summary

test: lint  ## the tests, those on several ranks too, but no slow ones; ARGS='-k halo -x' goes to pytest
	@.venv/bin/python -m pytest --durations=10 $(ARGS)

test-all: lint  ## all tests: every combination of settings, 6 and 9 ranks, real Slurm, benchmarks
	@.venv/bin/python -m pytest --durations=10 -m '' $(ARGS)

docs:  ## the documents as a site, build/site/index.html; needs neither torch nor MPI
	@test -x build/docs/bin/mkdocs || { $(PYTHON) -m venv build/docs && build/docs/bin/python -m pip install -q $(DOCS); }
	@NO_MKDOCS_2_WARNING=1 build/docs/bin/mkdocs build --strict --quiet -f docs/site/mkdocs.yml
	@echo build/site/index.html

slurm: setup  ## jobs on a real Slurm of one node, started here (root: installed too); writes benchmarks/slurm.md
	@jobs/try_slurm.sh $(ARGS)

bench: setup  ## the benchmarks, one after another; ARGS goes to each
	@for script in $$(grep -l '^QUESTION = ' benchmarks/*.py); do \
	  name=$$(basename $$script .py); echo "== $$name"; .venv/bin/python -m benchmarks.$$name $(ARGS) || exit; done

clean:  ## remove .venv and what runs left here; the cache of built wheels stays
	rm -rf .venv build *.egg-info .pytest_cache .hypothesis
	find distseg tests benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
