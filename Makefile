# `make` lists the targets. Each installs what it needs; the second time that is quick.

VENV := .venv
BIN := $(VENV)/bin
CLIENTS := .venv-clients
# For pip, e.g. TORCH_INDEX=https://download.pytorch.org/whl/cu126; empty chooses by the machine.
TORCH_INDEX ?=
# Not empty: the environment has exactly what requirements/ has, and pip checks hashes.
LOCKED ?=
# What a target needs of the environment, as files that say that it is there.
ifeq ($(LOCKED),)
OPTIONS := $(VENV)/.has-options
SERVING := $(VENV)/.has-serving
LOADTEST := $(VENV)/.has-loadtest
DEV := $(VENV)/.has-dev
else
OPTIONS := $(VENV)/.has-locked
SERVING := $(OPTIONS)
LOADTEST := $(OPTIONS)
DEV := $(OPTIONS)
endif
# Checks the options of `make up` before anything large is installed.
CHECK := PYTHONPATH=.typing $(BIN)/python -P -m pagewire.services.cli.up.check
# For the command: make up ARGS="--decode 2", make test ARGS="-k scheduler"
ARGS ?=
PYTHON ?= $(firstword $(foreach name,python3 python3.13 python3.12 python3.11 python3.14,\
	$(shell command -v $(name) >/dev/null 2>&1 \
	&& $(name) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(name))))

# An environment whose Python has gone or changed its version, or that lies elsewhere, is made again.
HAS := $(wildcard $(VENV)/.has-*)
comma := ,
ifneq ($(HAS),)
ifneq ($(shell $(BIN)/python -c 'import pip$(if $(filter-out %/.has-options,$(HAS)),$(comma) pagewire)' \
	2>/dev/null && echo fine),fine)
$(shell rm -f $(HAS))
endif
endif

.DEFAULT_GOAL := help
.PHONY: help setup up prove recording test test-parts test-clusters test-clients test-gpu test-compose test-exhaustive test-wheel loadtest bench-router bench-gpu bench-gpu-2 bench-warm bench-faults lint fmt lock clean redis prometheus

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(DEV) ## Make the whole environment; every other target adds what it needs by itself

ifneq ($(filter -h --help,$(ARGS)),)
up: $(OPTIONS) .typing/pagewire
	@$(CHECK) $(ARGS)
else
up: CHECK_FIRST = $(CHECK) $(ARGS)
up: $(SERVING) ## Start a cluster on this machine; options: ARGS="--prefill 1 --decode 2"
	@$(BIN)/pagewire up $(ARGS)
endif

prove: $(SERVING) ## Kill and freeze workers of a cluster of its own, and show that no token is lost (30 s)
	@$(BIN)/pagewire prove $(ARGS)

recording: $(SERVING) redis ## Record that as a picture, docs/prove.svg
	@$(BIN)/python -P -m pagewire.tools.recording --out docs/prove.svg --begin "ready after" -- $(BIN)/pagewire prove

ifneq ($(ARGS),)
test: $(DEV) redis prometheus
	$(BIN)/pytest $(ARGS)
else
test: test-parts test-clusters ## Run all tests that this machine can run
endif

test-parts: $(DEV) redis prometheus ## Run those of them that start no whole cluster
	$(BIN)/pytest -n 3 --dist loadfile tests/unit tests/kernels tests/integration

test-clusters: $(DEV) redis prometheus ## Run the others
	$(BIN)/pytest -n 2 --dist loadfile tests/e2e tests/faults tests/gpu tests/clients

test-exhaustive: $(DEV) redis ## Run all cases of what `make test` checks in part (20 minutes)
	$(BIN)/pytest -m "exhaustive or hypothesis" --hypothesis-profile many -n 2 --dist worksteal $(ARGS)

test-gpu: $(DEV) redis ## Run the tests that need a CUDA device (10 minutes)
ifneq ($(ARGS),)
	$(BIN)/pytest -m gpu $(ARGS)
else
	$(BIN)/pytest -m gpu -n 12 --dist worksteal tests/kernels tests/unit tests/integration tests/e2e
	$(BIN)/pytest -m gpu -n 5 --dist worksteal tests/gpu
endif

test-clients: $(CLIENTS)/.installed ## Run the tests with client libraries, in an environment of their own (3 minutes; 1.5 GB)
	@$(PYTHON) .ci/bootstrap.py redis
	$(CLIENTS)/bin/pytest -p no:dash $(or $(ARGS),tests/clients tests/client_libraries)

loadtest: $(LOADTEST) ## Compare kinds of clusters under load on this machine (8 minutes); writes a report
	@$(BIN)/python -P -m pagewire.loadtest.compare $(ARGS)

bench-router: $(LOADTEST) redis ## Count what a router carries on this machine, next to nginx if installed (4 minutes)
	@$(BIN)/python -P -m pagewire.loadtest.bench.router $(ARGS)

bench-gpu: $(LOADTEST) ## Time kernels and engine on a GPU, next to vLLM where it is installed
	@$(BIN)/python -P -m pagewire.loadtest.bench.one_gpu $(ARGS)

bench-gpu-2: $(LOADTEST) ## Time the KV wire and serving on two GPUs, likewise
	@$(BIN)/python -P -m pagewire.loadtest.bench.two_gpus $(ARGS)

bench-warm: $(LOADTEST) ## Time the first requests after "ready" on one GPU (5 minutes); fails if they wait
	@$(BIN)/python -P -m pagewire.loadtest.bench.warm $(ARGS)

bench-faults: $(LOADTEST) ## Kill, freeze and restart parts of a system under load: ARGS="pagewire-1p1d" (10 minutes)
	@$(BIN)/python -P -m pagewire.loadtest.faults.run $(ARGS)

test-compose: $(DEV) ## Build, start, torment and upgrade the containers; needs a Docker engine (12 minutes)
	@tests/compose/base_image.sh
	$(BIN)/pytest -m "compose or release" tests/compose $(ARGS)

test-wheel: $(DEV) ## Install the wheel and each extra in a clean environment, and try them (some minutes)
	$(BIN)/pytest -m release tests/e2e/test_wheel.py $(ARGS)

lint: $(DEV) .typing/pagewire ## Check style, types and the line budget
	$(BIN)/python -P -m pagewire.tools.line_budget
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPYPATH=.typing $(BIN)/mypy --explicit-package-bases -p pagewire

fmt: $(DEV) ## Format the code and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock: .venv-lock/bin/uv ## Write requirements/ from pyproject.toml; ARGS="--upgrade" takes newer versions
	@$(PYTHON) .ci/lock.py $< $(ARGS)

.venv-lock/bin/uv:
	@$(PYTHON) -m venv .venv-lock && .venv-lock/bin/pip install --quiet uv

clean: ## Remove the environment, caches and build outputs
	rm -rf $(VENV) $(CLIENTS) .venv-lock .typing build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

redis:
	@$(PYTHON) .ci/bootstrap.py redis

prometheus:
	@$(PYTHON) .ci/bootstrap.py prometheus

$(OPTIONS): pyproject.toml .ci/bootstrap.py $(if $(LOCKED),$(wildcard requirements/*.txt))
	@if [ -z "$(PYTHON)" ]; then \
		echo "Pagewire needs Python 3.11 or newer; python3 here is:" \
			"$$(python3 --version 2>&1 || true). Install one, or name it: make PYTHON=/path" >&2; \
		exit 1; \
	fi
	@$(PYTHON) .ci/bootstrap.py $(if $(LOCKED),locked,options) $(VENV)
	@touch $@

ifeq ($(LOCKED),)
$(SERVING): $(OPTIONS) | .typing/pagewire
	@$(CHECK_FIRST)
	@$(PYTHON) .ci/bootstrap.py serving $(VENV) $(TORCH_INDEX)
	@touch $@

$(LOADTEST): $(OPTIONS)
	@$(PYTHON) .ci/bootstrap.py loadtest $(VENV) $(TORCH_INDEX)
	@touch $(SERVING) $@

$(DEV): $(OPTIONS)
	@$(PYTHON) .ci/bootstrap.py dev $(VENV) $(TORCH_INDEX)
	@touch $(SERVING) $(LOADTEST) $@
endif

$(CLIENTS)/.installed: pyproject.toml .ci/bootstrap.py requirements/clients.txt
	@$(PYTHON) .ci/bootstrap.py locked $(CLIENTS) clients.txt
	@touch $@

# Type checkers don't follow an editable install; this is how they find the package.
.typing/pagewire:
	@mkdir -p .typing && ln -sfn .. $@
