# Included by the Makefile: the tests to run while working, and those in an environment of the lowest
# supported versions, which lies beside that of the others.
test-fast: OMP_NUM_THREADS := 1
test-fast: $(VENV)/.dev  ## run the tests that start no engine and no process, while you work
	$(PY) -m pytest --fast -n 2 --no-loadscope-reorder $(ARGS)

LOWEST := $(VENV)-lowest
LOWEST_PIP := $(LOWEST)/bin/python -m pip install -q --disable-pip-version-check
LOWEST_TESTS := tests/test_imports.py tests/trainer/base/test_checkpoint.py \
	tests/trainer/test_rloo_trainer.py tests/trainer/test_grpo_trainer.py \
	tests/trainer/test_sft_trainer.py tests/generation/transformers/test_shared_decoding.py \
	tests/ops/test_torch_internals.py tests/models/test_patches.py tests/package/test_private_names.py \
	tests/ops/test_attention_kernels.py

TORCH ?= $(shell sed -n 's/^torch==//p' requirements/lowest.txt)
LOWEST_PINS := $(LOWEST)/pins-$(TORCH).txt

$(LOWEST_PINS): pyproject.toml requirements/lowest.txt
	$(PYTHON) -m venv --clear $(LOWEST)
	sed 's/^torch==.*/torch==$(TORCH)/' requirements/lowest.txt > $(LOWEST)/pins.txt
	$(LOWEST_PIP) -c $(LOWEST)/pins.txt torch
	$(LOWEST_PIP) -c $(LOWEST)/pins.txt -e . pytest pytest-timeout
	mv $(LOWEST)/pins.txt $@

test-lowest: OMP_NUM_THREADS := 1
test-lowest: $(LOWEST_PINS)  ## train with the lowest supported versions of what trl builds on
	$(LOWEST)/bin/python -m pytest $(LOWEST_TESTS) $(ARGS)

.PHONY: test-fast test-lowest
