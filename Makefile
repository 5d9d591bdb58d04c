# Everything runs in a virtual environment that is made on first use. `make` lists the targets.

PYTHON ?= python3
NPROC ?= 4
ARGS ?= --pipeline-model-parallel-size $(NPROC)

VENV := .venv
INSTALLED := $(VENV)/.installed

.PHONY: help pretrain test lint docs format clean

help:
	@echo "make pretrain   train a small GPT with $(NPROC) pipeline ranks on this machine (ARGS=... for other settings)"
	@echo "make test       run all tests"
	@echo "make lint       ruff and mypy"
	@echo "make docs       write docs/schedules.md and its pictures"
	@echo "make format     let ruff format the code"
	@echo "make clean      remove the virtual environment and caches"

$(INSTALLED): setup.py pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[examples,viz,test,lint]'
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps megatron-core packaging
	@touch $@

# One thread per rank: the ranks share the cores.
pretrain: $(INSTALLED)
	OMP_NUM_THREADS=1 $(VENV)/bin/torchrun --nproc-per-node $(NPROC) examples/pretrain_gpt.py $(ARGS)

test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest

lint: $(INSTALLED)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

docs: $(INSTALLED)
	$(VENV)/bin/python docs/generate.py

format: $(INSTALLED)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache *.egg-info
