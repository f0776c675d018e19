# Every target sets up what it needs. From a clean clone: `make demo`, `make test`.
PYTHON ?= python3
VENV := .venv
ENGINE := .venv-engine
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo test sim test-deploy test-engine check fix soak bench-overhead clean

help:  ## Show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

$(VENV)/ok: pyproject.toml
	@echo "Setting up $(VENV): once, a minute or two"
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VENV)/bin/python -m pip install --quiet --editable '.[dev]'
	@touch $@

$(ENGINE)/ok: tests/engine/setup_env.sh tests/engine/requirements.txt pyproject.toml
	@echo "Setting up $(ENGINE): once, a few minutes and 2.2 GB"
	PYTHON=$(PYTHON) tests/engine/setup_env.sh $(ENGINE)
	@touch $@

demo: $(VENV)/ok  ## Two simulated H200 servers, the router, a load that rises and falls (ARGS="--seconds 30")
	$(VENV)/bin/crossover demo $(ARGS)

test: $(VENV)/ok  ## Unit, property, contract and integration tests, in a few minutes
	@# By a thread: a signal does not wake uvloop, so a test that hangs would hang for good.
	$(VENV)/bin/python -m pytest -m "not engine and not deploy" --timeout-method=thread $(ARGS)

sim: $(VENV)/ok  ## Every figure the steering must reach, in virtual time; 10 minutes at most
	$(VENV)/bin/crossover-loadtest sim $(ARGS)

test-engine: $(VENV)/ok $(ENGINE)/ok  ## The real SGLang on the CPU: plugin, and router in front of two servers
	$(ENGINE)/bin/python -m pytest -m engine tests/engine $(ARGS)

test-deploy: $(VENV)/ok  ## Rules, dashboards, images' files, live page: by promtool, Prometheus, linters, Chromium
	$(VENV)/bin/python -m pytest -m deploy tests/deploy $(ARGS)

check: $(VENV)/ok  ## Format, lint, types, import rules
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

fix: $(VENV)/ok  ## Format, and repair what the linter can
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

soak: $(VENV)/ok  ## 100,000 disconnects, 30 minutes of mixed traffic (ARGS="--minutes 5 --disconnects 10000")
	$(VENV)/bin/python -m tests.soak.soak $(ARGS)

bench-overhead: $(VENV)/ok  ## Router CPU per request and per chunk beside sglang-router
	$(VENV)/bin/python -m tests.bench.overhead $(ARGS)

clean:  ## Remove both virtual environments
	rm -rf $(VENV) $(ENGINE)
