# Both `make run` and `make test` start from nothing but python3 (3.10 or newer) and make.

PYTHON ?= python3
VENV := .venv
# The pinned torch first and by itself: asked for through a range, pip may choose another build of the same release.
INSTALL = $(VENV)/bin/pip install "$$(grep ^torch== constraints.txt)" && $(VENV)/bin/pip install -c constraints.txt -e

.PHONY: run test lint

run: $(VENV)/.installed-run
	$(VENV)/bin/elastic run configs/gpt-bytes.yaml

test: $(VENV)/.installed-test
	$(VENV)/bin/pytest

lint: $(VENV)/.installed-test
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

# A stamp is newer than what it was installed from, so each is installed once, and again when one of these changes.
$(VENV)/.installed-run: pyproject.toml constraints.txt | $(VENV)/bin/pip
	$(INSTALL) ".[local]"
	touch $@

$(VENV)/.installed-test: pyproject.toml constraints.txt | $(VENV)/bin/pip
	$(INSTALL) ".[dev]"
	touch $@

$(VENV)/bin/pip:
	$(PYTHON) -m venv --clear $(VENV)
