# Every target sets up what it needs in .venv, on a fresh machine too.
PYTHON ?= python3
BIN := .venv/bin
CONSTRAINTS ?= constraints.txt
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS)

.PHONY: quickstart setup test lint docs clean
quickstart: setup
	$(BIN)/contaccum quickstart

setup: .venv/installed

.venv/installed: pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) -e '.[dev]'
	touch $@

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: setup
	$(PIP) -e '.[docs]'
	$(BIN)/mkdocs build --strict

clean:
	rm -rf .venv build dist site src/*.egg-info
