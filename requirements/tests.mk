# Included by the Makefile: the tests to run while working, and those in an environment of the lowest
# supported versions, which lies beside that of the others.
test-fast: OMP_NUM_THREADS := 1
test-fast: $(VENV)/.dev  ## run the tests that start no engine and no process, while you work
	$(PY) -m pytest --fast -n 2 --no-loadscope-reorder $(ARGS)

LOWEST := $(VENV)-lowest
LOWEST_PIP := $(LOWEST)/bin/python -m pip install -q --disable-pip-version-check
LOWEST_TESTS := tests/test_imports.py tests/trainer/base/test_checkpoint.py \
	tests/trainer/test_rloo_trainer.py tests/trainer/test_grpo_trainer.py \
	tests/trainer/test_sft_trainer.py tests/generation/transformers/test_shared_decoding.py

$(LOWEST)/.ready: pyproject.toml requirements/lowest.txt
	$(PYTHON) -m venv --clear $(LOWEST)
	$(LOWEST_PIP) -c requirements/lowest.txt torch
	$(LOWEST_PIP) -c requirements/lowest.txt -e . pytest pytest-timeout
	touch $@

test-lowest: OMP_NUM_THREADS := 1
test-lowest: $(LOWEST)/.ready  ## train with the lowest supported versions of what trl builds on
	$(LOWEST)/bin/python -m pytest $(LOWEST_TESTS) $(ARGS)

.PHONY: test-fast test-lowest
