# Everything from a machine with Python 3.11+, pip and make. Overrides for training go in ARGS:
#   make train ARGS="experiment=long"        make train ARGS="data=text_files data.paths=[book/]"
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q -c constraints.txt
STAMPS := $(VENV)/stamps
ARGS ?=

.PHONY: help train test test-all test-litgpt litgpt-table test-trl test-oldest test-newest gpu-check lint docs clean

help:
	@echo "make train      create $(VENV) if needed, then train the main job (ARGS=... for overrides)"
	@echo "make test       create $(VENV) if needed, then run the tests of every change (tests/unit and tests/ranks)"
	@echo "make test-all   the nightly tests as well: full matrices, mutants, sweeps of models (hours)"
	@echo "make test-litgpt  the tests of LitGPT's models, in an environment beside $(VENV); make litgpt-table: their errors"
	@echo "make test-trl   losses of the examples against TRL's own, adapters of peft, in an environment beside $(VENV)"
	@echo "make test-oldest  the tests with the oldest versions that are allowed, in an environment beside $(VENV)"
	@echo "make test-newest  the tests with the newest releases of everything, likewise (NEWEST_TORCH=torch==2.14.1 for a CPU build)"
	@echo "make gpu-check  tests and figures of one NVIDIA GPU (nothing is installed); of several: docs/guides/gpus.md"
	@echo "make lint       ruff, pyright, import-linter, codespell"
	@echo "make docs       the docs as a site in build/site, with every link checked (no network)"
	@echo "make clean      remove $(VENV) and what tools have cached"

train: $(STAMPS)/train
	$(BIN)/python -m lightning_cp.train $(ARGS)

# Two at a time: ranks mostly wait for each other's messages, which leaves one core of two idle.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal

test: $(STAMPS)/dev
	$(PYTEST) --durations 15

test-all: $(STAMPS)/dev
	$(PYTEST) -m "" tests

LITGPT := $(VENV)-litgpt
LITGPT_TESTS := tests/ranks/models/test_litgpt.py tests/ranks/models/test_litgpt_refused.py tests/ranks/models/test_litgpt_training.py \
  tests/ranks/optim/test_qk_clip_models.py::test_litgpt

test-litgpt: $(LITGPT)/stamp
	$(LITGPT)/bin/python -m pytest -n 2 --dist worksteal $(LITGPT_TESTS)

litgpt-table: $(LITGPT)/stamp
	$(LITGPT)/bin/python -m tests.nightly.models litgpt

# litgpt wants older versions than $(VENV) has (huggingface_hub, jsonargparse), with which transformers 5 cannot be
# imported: older ones of all three are installed here, and come before the rest, which is that of $(VENV).
OLDER := litgpt==0.5.13 transformers==4.56.2
PACKAGES := -c "import sysconfig; print(sysconfig.get_path('purelib'))"
$(LITGPT)/stamp: $(STAMPS)/dev
	$(BIN)/python -m venv --clear --without-pip $(LITGPT)
	packages=$$($(BIN)/python $(PACKAGES)) \
	  && echo "import site; site.addsitedir('$$packages')" > $$($(LITGPT)/bin/python $(PACKAGES))/beside.pth
	$(BIN)/python -m pip --disable-pip-version-check --python $(LITGPT)/bin/python install -q $(OLDER)
	@touch $@

TRL := $(VENV)-trl

test-trl: $(TRL)/stamp
	$(TRL)/bin/python -m pytest tests/unit/loss/test_trl.py tests/ranks/loss/test_peft.py tests/ranks/checkpoint/pretrained/test_adapters.py

$(TRL)/stamp: $(STAMPS)/dev
	$(BIN)/python -m venv --clear --without-pip $(TRL)
	packages=$$($(BIN)/python $(PACKAGES)) \
	  && echo "import site; site.addsitedir('$$packages')" > $$($(TRL)/bin/python $(PACKAGES))/beside.pth
	$(BIN)/python -m pip --disable-pip-version-check --python $(TRL)/bin/python install -q trl==1.16.0 accelerate==1.15.0 peft==0.21.2
	@touch $@

OLDEST := $(VENV)-oldest

# On CPU. A CUDA build that has once asked the driver for GPUs, as there are none, could not be forked any more.
test-oldest: $(OLDEST)/stamp
	CUDA_VISIBLE_DEVICES= PYTORCH_NVML_BASED_CUDA_CHECK=1 $(OLDEST)/bin/python -m pytest -n 2 --dist worksteal $(ARGS)

# The constraints of constraints-oldest.txt, and of constraints.txt those of all other packages.
$(OLDEST)/stamp: $(STAMPS)/venv pyproject.toml constraints.txt constraints-oldest.txt
	$(BIN)/python -m venv --clear --without-pip $(OLDEST)
	awk -F= 'NR == FNR {older[$$1]; print; next} !($$1 in older)' constraints-oldest.txt constraints.txt \
	  > $(OLDEST)/constraints.txt
	$(BIN)/python -m pip --disable-pip-version-check --python $(OLDEST)/bin/python install -q \
	  -c $(OLDEST)/constraints.txt -e ".[hf,dev]"
	@touch $@

NEWEST := $(VENV)-newest
NEWEST_TORCH ?= torch

# Made afresh by each run: what is newest changes.
test-newest: $(STAMPS)/venv
	$(BIN)/python -m venv --clear --without-pip $(NEWEST)
	$(BIN)/python -m pip --disable-pip-version-check --python $(NEWEST)/bin/python install -q "$(NEWEST_TORCH)" -e ".[hf,dev]"
	CUDA_VISIBLE_DEVICES= $(NEWEST)/bin/python -m pytest -n 2 --dist worksteal $(ARGS)

# Installs nothing: $(VENV) if it is there, else PYTHON; or GPU_PYTHON=python for an environment of your own.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
gpu-check:
	@PYTHONPATH=. $(GPU_PYTHON) -m benchmarks.gpu_check $(ARGS)

lint: $(STAMPS)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/codespell

docs: $(STAMPS)/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

clean:
	rm -rf $(VENV) $(LITGPT) $(TRL) $(OLDEST) $(NEWEST) build dist .pytest_cache .ruff_cache .import_linter_cache .hypothesis

# The stamps keep the second run quick: pip runs again only when what it reads has changed.
$(STAMPS)/train: $(STAMPS)/venv pyproject.toml constraints.txt
	$(PIP) -e ".[hf]"
	@touch $@

$(STAMPS)/dev: $(STAMPS)/venv pyproject.toml constraints.txt
	$(PIP) -e ".[hf,dev]"
	@touch $@ $(STAMPS)/train

$(STAMPS)/docs: $(STAMPS)/venv pyproject.toml constraints.txt
	$(PIP) -e ".[docs]"
	@touch $@

# Some systems ship Python without ensurepip; then the environment's pip comes from the system's.
$(STAMPS)/venv:
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" \
	  || { echo "Python 3.11 or newer is needed, $(PYTHON) is $$($(PYTHON) -V). Try PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) \
	  || { $(PYTHON) -m venv --clear --without-pip $(VENV) \
	       && $(PYTHON) -m pip --python $(BIN)/python install -q pip; }
	@mkdir -p $(STAMPS) && touch $@
