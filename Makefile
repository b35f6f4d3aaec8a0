# Every target makes .venv when it is missing or older than what it is made from, then runs. `make` lists them.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
NEWEST ?= python3.13
VLLM ?= $(CURDIR)/build/vllm
JUDGE ?= traces

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory
SHELL := /bin/bash

# One shell function, so that both installs read the same. $(1) is the list of extras, $(2) says what they are.
define install
	@echo "headway: installing $(2) into $(VENV); the first time takes a minute or more" && start=$$(date +%s) && \
	$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --no-compile --no-input \
		-c constraints.txt -e '.[$(1)]' -e packages/builtin-model && \
	echo "headway: installed in $$(( $$(date +%s) - start )) s"
endef

# The cache and replay alone, in an environment without torch. $(1) is its folder, $(2) its Python, $(3) what to install.
# Old packages call what new ones deprecate, so here such warnings are no errors.
define light
	@test -x $(1)/bin/python || $(2) -m venv $(1)
	@$(1)/bin/python -m pip install --quiet --quiet --disable-pip-version-check --no-input \
		-e . $(3) hypothesis pytest pytest-timeout pytest-xdist
	@$(1)/bin/python -m pytest -n 2 -q -m "not slow" -W default::DeprecationWarning -W default::PendingDeprecationWarning \
		tests/cache tests/replay $(ARGS)
endef

# The site, silent unless a page or a docstring has a fault. (With --quiet, --strict would count no warnings.)
define site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict > $(VENV)/site.txt 2>&1 || { cat $(VENV)/site.txt >&2; exit 1; }
endef

.PHONY: help
help:  ## List the targets
	@echo "Usage: make TARGET [ARGS=\"...\"] [PYTHON=python3.12]"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: serve
serve: $(VENV)/.serve  ## Serve the built-in model on port 8000; ARGS go to `headway serve`
	@$(BIN)/headway serve $(ARGS)

.PHONY: test
test: $(VENV)/.dev  ## Run the tests on two processes, without the slow ones; ARGS go to pytest
	@$(BIN)/python -m pytest -n 2 -m "not slow" $(ARGS)

.PHONY: slow
slow: $(VENV)/.dev  ## Run the slow tests on two processes; ARGS go to pytest
	@$(BIN)/python -m pytest -n 2 -m slow $(ARGS)

.PHONY: families
families: $(VENV)/.dev  ## Compare every family of models with generate(), going on where it stopped; writes docs/families.md
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONPATH=. $(BIN)/python -m tests.families.run $(ARGS)

# Each client is installed into build/clients/NAME: about 5 GB and 20 minutes the first time. Needs npm for Vercel's ai.
.PHONY: clients
clients: $(VENV)/.dev  ## Run people's clients against the built-in model, going on where it stopped; writes docs/clients.md
	@VLLM=$$(test -d $(VLLM) && echo $(VLLM)) PYTHONPATH=. $(BIN)/python -m tests.clients.run $(ARGS)

.PHONY: test-lowest
test-lowest:  ## Run the tests of cache and replay with the oldest dependencies that pyproject.toml allows
	$(call light,$(VENV)-lowest,$(PYTHON),$$($(PYTHON) tools/lowest.py report zstd))

.PHONY: test-newest
test-newest:  ## Run the same tests on Python 3.13, where there is one
	@if $(NEWEST) -c '' 2>/dev/null; then $(MAKE) .test-newest; \
		else echo "headway: skipped, because there is no $(NEWEST) here (NEWEST=PATH names one)"; fi

.PHONY: .test-newest
.test-newest:
	$(call light,$(VENV)-newest,$(NEWEST),-c constraints.txt jinja2 matplotlib zstandard)

# vLLM, its tests and what they import are fetched into VLLM. JUDGE names a folder of tests/vllm: traces, own-tests, computes.
.PHONY: judge-vllm
judge-vllm:  ## Judge `headway.vllm` by vLLM: JUDGE=traces|own-tests|computes|server; VLLM is its folder; ARGS go to the judge
	@$(PYTHON) tools/vllm_env.py $(VLLM)
	@VLLM=$(VLLM) PYTHONPATH=$(VLLM)/$(if $(filter computes server,$(JUDGE)),cpuwheel/x,vllm33):src:. OMP_NUM_THREADS=1 \
		$(VLLM)/venv/bin/python -m tests.vllm.$(subst -,_,$(JUDGE)) $(ARGS)

# Dynamo's index is installed into build/dynamo.
.PHONY: judge-kv-events
judge-kv-events: $(VENV)/.dev  ## Compare what Dynamo's index learns from KV events with what the cache reuses; ARGS go to the judge
	@test -x build/dynamo/bin/python || $(PYTHON) -m venv build/dynamo
	@build/dynamo/bin/python -m pip install --quiet --disable-pip-version-check ai-dynamo-runtime==1.6.1
	@OMP_NUM_THREADS=1 PYTHONPATH=src:. $(BIN)/python -m tests.server.judge_kv_events \
		--indexer build/dynamo/bin/python $(ARGS)

.PHONY: check-prometheus
check-prometheus: $(VENV)/.dev  ## Run the dashboard's queries in a real Prometheus that scrapes a loaded server (apt install prometheus)
	@$(BIN)/python tools/check_prometheus.py $(ARGS)

.PHONY: check-page
check-page: $(VENV)/.dev  ## Look at the live page in Chromium (apt install chromium); ARGS=--write takes the pictures of docs/ anew
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt playwright
	@$(BIN)/python -m pytest -q -m slow tests/server/test_live_page.py
	@$(BIN)/python tools/live_page.py $(ARGS)

.PHONY: mutants
mutants: $(VENV)/.dev  ## Change one line of the cache at a time and see whether a test notices; ARGS go to tools/mutants.py
	@$(BIN)/python tools/mutants.py $(ARGS)

.PHONY: lint
lint: $(VENV)/.dev  ## Check style, types, imports, the repository's rules and the documentation
	@echo "headway: ruff" && $(BIN)/ruff check --quiet . && $(BIN)/ruff format --check --quiet .
	@echo "headway: mypy" && $(BIN)/mypy
	@echo "headway: imports" && $(BIN)/python tools/check_imports.py
	@$(BIN)/lint-imports --no-cache > $(VENV)/imports.txt || { cat $(VENV)/imports.txt >&2; exit 1; }
	@echo "headway: rules" && $(BIN)/python tools/check_rules.py
	@echo "headway: prose and links" && $(BIN)/python tools/check_prose.py && $(BIN)/python tools/check_links.py
	@echo "headway: documentation" && $(BIN)/python tools/check_structure.py
	$(site)

.PHONY: docs
docs: $(VENV)/.dev  ## Build the documentation site into build/site
	$(site)
	@echo "headway: open build/site/index.html"

.PHONY: wheel
wheel: $(VENV)/.dev  ## Build the packages of Headway and of the built-in model into dist/
	@$(BIN)/python -m build --no-isolation --outdir dist . && \
		$(BIN)/python -m build --no-isolation --outdir dist packages/builtin-model

.PHONY: bench
bench: $(VENV)/.dev  ## Measure what each operation of the cache costs; ARGS go to `headway bench`
	@$(BIN)/headway bench $(ARGS)

.PHONY: plots
plots: $(VENV)/.dev  ## Draw the figures of docs/ again
	@$(BIN)/python benchmarks/plots.py $(ARGS)

.PHONY: train
train: $(VENV)/.dev  ## Train the built-in model again (up to 90 minutes on two cores)
	@$(BIN)/python training/train.py $(ARGS)

.PHONY: clean
clean:  ## Remove .venv, caches and builds
	@rm -rf $(VENV) $(VENV)-lowest $(VENV)-newest build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find src tests tools -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# The environment: its Python first, then a stamp for each set of extras. The larger set holds the smaller.
$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { \
		echo "headway: needs Python 3.11 or later, and there is no $(PYTHON) here" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "headway: needs Python 3.11 or later, and $(PYTHON) is" \
			"$$($(PYTHON) -c 'import platform; print(platform.python_version())');" \
			"name a newer one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "headway: making $(VENV) with $$($(PYTHON) --version)"
	@rm -rf $(VENV) && $(PYTHON) -m venv $(VENV) >/dev/null || { rm -rf $(VENV); \
		echo "headway: $(PYTHON) cannot make environments; on Debian or Ubuntu: apt install python3-venv" >&2; \
		exit 1; }

$(VENV)/.serve: pyproject.toml packages/builtin-model/pyproject.toml constraints.txt | $(BIN)/python
	$(call install,serve$(comma)report,what the server and the reports need (torch, transformers, ...))
	@touch $@

$(VENV)/.dev: pyproject.toml packages/builtin-model/pyproject.toml constraints.txt | $(BIN)/python
	$(call install,serve$(comma)report$(comma)ray$(comma)tiers$(comma)docs$(comma)dev,what the server and all checks need (torch, transformers, pytest, mkdocs, ...))
	@touch $(VENV)/.serve $@

comma := ,
