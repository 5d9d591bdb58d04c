# Everything runs in a virtual environment that is made on first use. `make` lists the targets.

PYTHON ?= python3
# All GPUs of this machine, where there are several.
NUM_GPUS := $(words $(wildcard /dev/nvidia[0-9]))
NPROC ?= $(if $(filter-out 0 1,$(NUM_GPUS)),$(if $(filter 9,$(NUM_GPUS)),8,$(NUM_GPUS)),4)
MINUTES ?= 10
SEED ?=
TESTS ?=
ARGS ?= --pipeline-model-parallel-size $(NPROC)
MEGATRON ?=

# TORCH=2.15.0 takes another torch than constraints.txt, PYTHON=python3.13 another Python than the machine's own, each in a
# virtual environment of its own.
TORCH ?=
# SYSTEM_PYTHON=python3 takes that Python with the torch that it has, and installs nothing: as on a machine with GPUs where torch
# is there, and a registry is not. The tests take pytest.
SYSTEM_PYTHON ?=
VERSION := $(if $(filter-out python3,$(PYTHON)),$(shell $(PYTHON) -c 'import sys; print("python%d.%d" % sys.version_info[:2])'))
VENV := .venv$(addprefix -,$(VERSION))$(addprefix -,$(TORCH))
INSTALLED := $(if $(SYSTEM_PYTHON),,$(VENV)/.installed)
RUN := $(or $(SYSTEM_PYTHON),$(VENV)/bin/python)
TORCHRUN := $(RUN) -m torch.distributed.run
CONSTRAINTS := $(VENV)/constraints.txt
SAVED := checkpoints/pretrain

.PHONY: help pretrain generate test test-gpu test-models test-images test-trainer test-megatron test-torchtitan test-rl test-nodes wheel fuzz labs soak \
	lint docs site bench \
	bench-all bench-peers bench-packages bench-gpu format clean

help:
	@echo "make pretrain   train a small GPT, afresh, with $(NPROC) pipeline ranks on this machine (ARGS=... for other settings)"
	@echo "make generate   let the model of the last \`make pretrain\` write, with $(NPROC) pipeline ranks"
	@echo "make test       run the tests, and print the forty slowest (TESTS=tests/plan for some of them)"
	@echo "                with TORCH=2.15.0 or PYTHON=python3.13, as all else, in an environment of its own"
	@echo "make test-gpu   run the pipelines' tests on GPUs: with one GPU, the ranks share it"
	@echo "                with SYSTEM_PYTHON=python3, as all else, by that Python and its torch: nothing is installed"
	@echo "make test-models  compare models of Hugging Face with the whole model (half an hour; installs peft and others)"
	@echo "make test-images  compare classifiers of torchvision and timm, cut by split, with the whole model (a quarter of an hour)"
	@echo "make test-trainer  compare transformers' Trainer, trl's and Lightning's in front of a pipeline with the plain ones (ten minutes)"
	@echo "make test-megatron  run Megatron's tests of its schedules, on ours; MEGATRON=... is a checkout of Megatron-LM (a minute)"
	@echo "make test-torchtitan  run the trainers of torchtitan and NeMo Automodel by torch's schedules and by ours (five minutes)"
	@echo "make test-rl    run the modules of verl and SkyRL that call Megatron's schedules by ours, and the longer comparisons of"
	@echo "                post-training: packed microbatches whose number changes, quantised weights (ten minutes)"
	@echo "make test-nodes  run the example on two nodes of a network of its own, with faults (as root; ten minutes)"
	@echo "make wheel      build the wheel and the sdist, and try the wheel where nothing else is installed"
	@echo "make fuzz       try random cases against the unpartitioned model for MINUTES=10 (SEED=... for the same ones again)"
	@echo "make labs       prove the solutions of all labs, and let thirty mistakes be found (a minute)"
	@echo "make soak       run the tests that take long, then break a run in 100 ways, at random (SEED=...): half an hour"
	@echo "make lint       ruff and mypy"
	@echo "make docs       write the pages made from code: schedules, pictures, settings, index"
	@echo "make site       build the documentation's site into site/, with the API reference; links are checked"
	@echo "make bench      run the benchmarks that matter (half an hour) and put their tables into benchmarks/TABLES.md"
	@echo "make bench-all  run all of them (an hour and a quarter)"
	@echo "make bench-peers  run those against torch's own pipelining only; TORCH=2.15.0 takes that of another torch"
	@echo "make bench-gpu  run the benchmarks on GPUs (a quarter of an hour) and put their tables into benchmarks/TABLES.md"
	@echo "make format     let ruff format the code"
	@echo "make clean      remove the virtual environments and caches"

ifdef SYSTEM_PYTHON
export PYTHONPATH := $(CURDIR)
endif

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	sed '$(if $(TORCH),s/^torch==.*/torch==$(TORCH)/)' constraints.txt > $(CONSTRAINTS)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) --editable '.[examples,viz,test,lint]'
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) --no-deps megatron-core packaging
	@touch $@

# One thread per rank: the ranks share the cores. Starts afresh: what the last `make pretrain` saved makes room.
pretrain: $(INSTALLED)
	rm -rf $(SAVED)
	OMP_NUM_THREADS=1 $(TORCHRUN) --nproc-per-node $(NPROC) examples/pretrain_gpt.py --save $(SAVED) $(ARGS)

generate: $(INSTALLED)
	OMP_NUM_THREADS=1 $(TORCHRUN) --nproc-per-node $(NPROC) examples/generate.py --load $(SAVED)

# Three tests side by side, each with ranks of its own, which wait for each other some of the time. Tests marked
# `soak` are left out (pyproject.toml). Where Python is told to keep no bytecode, each of their processes would compile the
# package and the tests again.
test soak: export PYTHONDONTWRITEBYTECODE :=
test: $(INSTALLED)
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(RUN) -m pytest -n 3 $(TESTS)

# Ends with exit code 1 where there is a GPU that torch cannot use.
test-gpu: $(INSTALLED)
	@$(RUN) -W ignore tests/gpu/machine.py; case $$? in \
		0) OMP_NUM_THREADS=1 $(RUN) -m pytest tests/gpu;; \
		2) echo "make test-gpu: skipped, since there is no GPU here; make test runs the same tests on the CPU.";; \
		*) exit 1;; \
	esac

# Nothing is downloaded from hubs: models are made from small random configs.
test-models: $(INSTALLED)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) --editable '.[models]'
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(RUN) -m pytest tests/integrations/test_transformers.py \
		tests/integrations/models_of_transformers.py tests/integrations/towers_of_transformers.py \
		tests/integrations/finetuning.py
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(RUN) tests/integrations/sweep_of_transformers.py

# Into an environment of its own. Its table goes into docs/images.md. pip takes the torchvision that is made for this torch.
test-images: constraints.txt
	$(PYTHON) -m venv .venv-images
	sed '$(if $(TORCH),s/^torch==.*/torch==$(TORCH)/)' constraints.txt > .venv-images/constraints.txt
	.venv-images/bin/pip install --quiet --disable-pip-version-check --constraint .venv-images/constraints.txt --editable . torchvision timm
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 .venv-images/bin/python tests/integrations/sweep_of_images.py

# Into an environment of its own. TRAINER="transformers==5.20.0 accelerate==1.10.1 trl==1.14.0" takes these releases.
TRAINER ?=
test-trainer: constraints.txt
	$(PYTHON) -m venv .venv-trainer
	sed '$(if $(TORCH),s/^torch==.*/torch==$(TORCH)/)' constraints.txt > .venv-trainer/constraints.txt
	.venv-trainer/bin/pip install --quiet --disable-pip-version-check --constraint .venv-trainer/constraints.txt --editable '.[test,trainers]'
	$(if $(TRAINER),.venv-trainer/bin/pip install --quiet --disable-pip-version-check $(TRAINER))
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 .venv-trainer/bin/python -m pytest tests/integrations/test_trainer.py \
		tests/integrations/test_in_memory.py tests/integrations/trainers_of_transformers.py \
		tests/integrations/test_trainer_page.py tests/integrations/test_lightning.py

# All of Megatron that they import is the checkout's, which imports triton from 0.18 on.
CHECKOUT := $(wildcard $(MEGATRON)/tests/unit_tests/pipeline_parallel/test_schedules.py)
test-megatron: $(if $(CHECKOUT),$(INSTALLED))
	$(if $(CHECKOUT),,$(error pass the folder of a checkout of Megatron-LM: make test-megatron MEGATRON=../Megatron-LM))
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) einops pytest-mock
	$(if $(wildcard $(MEGATRON)/megatron/core/transformer/moe/paged_stash.py),$(VENV)/bin/pip install --quiet \
		--disable-pip-version-check triton)
	OMP_NUM_THREADS=1 $(TORCHRUN) --nproc-per-node 8 tests/integrations/megatron_own.py $(MEGATRON)

# Into an environment of its own, with what of their requirements a step on the CPU imports.
TITAN := .venv-torchtitan
test-torchtitan: constraints.txt
	$(PYTHON) -m venv $(TITAN)
	sed '$(if $(TORCH),s/^torch==.*/torch==$(TORCH)/)' constraints.txt > $(TITAN)/constraints.txt
	$(TITAN)/bin/pip install --quiet --disable-pip-version-check --constraint $(TITAN)/constraints.txt --editable . transformers einops tyro
	$(TITAN)/bin/pip install --quiet --disable-pip-version-check --no-deps torchtitan==0.3.0 nemo-automodel==0.7.0 spmd_types==0.2.3 \
		torch_checkpointing torchdata
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(TITAN)/bin/python tests/integrations/trainers_of_torch.py

# Into an environment of its own, with what of their requirements these modules import.
RL := .venv-rl
test-rl: constraints.txt
	$(PYTHON) -m venv $(RL)
	sed '$(if $(TORCH),s/^torch==.*/torch==$(TORCH)/)' constraints.txt > $(RL)/constraints.txt
	$(RL)/bin/pip install --quiet --disable-pip-version-check --constraint $(RL)/constraints.txt --editable '.[models,test]' bitsandbytes \
		torchao omegaconf tensordict hydra-core jaxtyping loguru pydantic codetiming ray
	$(RL)/bin/pip install --quiet --disable-pip-version-check --constraint $(RL)/constraints.txt --no-deps megatron-core verl==0.9.1 \
		skyrl==0.3.0
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(RL)/bin/python tests/integrations/trainers_of_rl.py
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(RL)/bin/python -m pytest tests/integrations/quantised.py \
		tests/integrations/test_post_training.py tests/integrations/test_weights_of_transformers.py

# Its table goes into docs/reliability.md.
test-nodes: $(INSTALLED)
	$(RUN) tests/nodes.py

# Into an environment of its own: what pip brings along is all that the README's script gets.
wheel: $(INSTALLED)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check build twine
	rm -rf build dist .venv-wheel
	$(RUN) -m build --outdir dist
	$(VENV)/bin/twine check --strict dist/*
	$(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) dist/*.whl
	OMP_NUM_THREADS=1 .venv-wheel/bin/python tests/installed.py

fuzz: $(INSTALLED)
	OMP_NUM_THREADS=1 $(RUN) -W ignore tests/fuzz --minutes $(MINUTES) $(addprefix --seed ,$(SEED))

labs: $(INSTALLED)
	OMP_NUM_THREADS=1 $(RUN) labs/check.py

soak: $(INSTALLED)
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n 2 -m soak
	OMP_NUM_THREADS=1 $(RUN) tests/soak_restart.py --faults 100 $(addprefix --seed ,$(SEED))

lint: $(INSTALLED)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

docs: $(INSTALLED)
	$(RUN) docs/generate.py

# Read it with `python -m http.server --directory site`. It loads nothing from elsewhere.
site: $(INSTALLED)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet

# Ranks that sleep side by side need no cores of their own, but nothing else should run meanwhile. `make bench` looks at the
# peers of another torch too, in a virtual environment of its own; its tables bear the version.
NEWEST := 2.15.0
PEERS := 'bare-loop 1f1b,bare-loop zbv,megapipe 1f1b,megapipe zbv,megapipe dualpipev,torch 1F1B,torch ZBVZeroBubble,torch DualPipeV,megatron-core 1f1b,dualpipe dualpipe'
LARGE := 'bare-loop 1f1b,megapipe 1f1b,megapipe zb2p,megapipe zbv,torch 1F1B,torch ZBVZeroBubble,megatron-core 1f1b'
BENCH = $(RUN) -W ignore -m benchmarks

bench bench-all bench-peers: export OMP_NUM_THREADS := 1

bench-packages: $(INSTALLED)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps dualpipe==1.0.0

bench: bench-packages
	$(BENCH).schedules --pp 4 --microbatches 8
	$(BENCH).schedules --pp 8 --microbatches 32 --rounds 2
	$(BENCH).schedules --pp 4 --microbatches 8 --rounds 3 --message-bytes 4194304
	$(BENCH).moe --pp 4 --microbatches 16 --rounds 3
	$(BENCH).moe --pp 4 --microbatches 32 --rounds 2 --only dualpipev zbv interleaved_1f1b combined_1f1b
	$(BENCH).moe --pp 4 --microbatches 16 --rounds 3 --milliseconds 20 --exchange-milliseconds 2.5 --only zbv dualpipev \
		interleaved_zb1p combined_zb1p
	$(BENCH).moe --pp 1 --microbatches 16
	$(BENCH).tensor_parallel
	$(BENCH).compute
	$(BENCH).steps --pp 4 --microbatches 8
	$(BENCH).host --pp 2
	$(BENCH).gpu
	$(if $(TORCH),,$(MAKE) bench-peers TORCH=$(NEWEST))
	$(BENCH).document

bench-peers: bench-packages
	$(BENCH).schedules --pp 4 --microbatches 8 --runners $(PEERS)
	$(BENCH).host --pp 2

bench-all: bench
	$(BENCH).schedules --pp 4 --microbatches 16 --rounds 3
	$(BENCH).schedules --pp 8 --microbatches 16 --rounds 3
	$(BENCH).schedules --pp 4 --microbatches 8 --rounds 2 --message-bytes 33554432 --runners $(LARGE)
	$(BENCH).tuned --pp 4 --microbatches 8
	$(BENCH).tuned --pp 8 --microbatches 16 --schedules zbv
	$(BENCH).activations
	$(BENCH).split
	$(BENCH).capture
	$(BENCH).host --pp 1
	$(BENCH).device_calls --pp 2
	$(BENCH).device_calls --pp 4
	$(BENCH).saving
	$(BENCH).first_step --pp 8
	$(BENCH).large_jobs
	$(BENCH).document

bench-gpu: $(INSTALLED)
	@$(RUN) -W ignore tests/gpu/machine.py || [ $$? = 2 ]
	$(RUN) -W ignore -m benchmarks.gpu
	$(RUN) -W ignore -m benchmarks.gpu_experts
	$(RUN) -m benchmarks.document

format: $(INSTALLED)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:
	rm -rf .venv .venv-* build dist site .mypy_cache .pytest_cache .ruff_cache *.egg-info
