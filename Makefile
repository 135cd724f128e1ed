# Each target makes .venv if it is missing, from constraints.txt.
#
#   make demo        run the quickstart notebook headless on two ranks, print the comparison
#   make lab         open the quickstart in JupyterLab, with the other notebooks beside it
#   make quick       the unit tests without torch, in seconds
#   make test        the tests every commit must pass: all unit tests and real two-rank launches
#   make integration  kernels, papermill, losses, your own models, reports, the Kaggle stand-in, the package
#   make check       format, lint and types
#   make notebooks   every notebook with papermill, executed copies in build/notebooks; and one broken on purpose
#   make strategies  every strategy trains the same model, resumes from every other, and reports what it must
#   make planner     plans against the memory, messages and step times of real ranks
#   make same-program  small programs under bare torchrun and under labkit: nothing may differ
#   make witness       right trainings, of which nothing may be said, and wrong ones, which must be found
#   make faults      every way a run can end: killed, stuck, stopped, out of disk, out of memory
#   make cluster     a real two-node Slurm and two hosts over ssh, created and removed by the tests; needs root
#   make cluster-demo  from one machine to a cluster and back, in one go
#   make browser     JupyterLab in a real Chromium
#   make gpu         the tests that need GPUs, on all of them; a page in build/gpu. GPU_PYTHON: use your own torch
#   make cuda-dispatch  plans for GPUs against a CUDA build of torch (5 GB), which needs no GPU for it
#   make kaggle      an exported notebook with Kaggle's versions, offline; creates the environment in build/kaggle-image
#   make kaggle-table  the GPU suite and three labs on Kaggle's two T4s, with your account; docs/evidence/kaggle_runs.md
#   make soak        many launches, for statistics
#   make bench       side-by-side measurements
#   make docs        the documentation as a website that opens offline, in build/docs; run make notebooks first for labs with results
#   make slides      a lecture's slides from the executed core labs, in build/slides.html; run make notebooks first
#   make gallery     executed notebooks as pages, and images of the view in every state, in build/gallery
#
# Without an NVIDIA GPU, PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu saves gigabytes of CUDA packages.

PYTHON ?= python3
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal
PIP := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt
# Papermill and the tests decide by themselves what they need; a setting left in the shell must not.
unexport LABKIT_UI
# Otherwise every rank, kernel and test compiles labkit anew.
unexport PYTHONDONTWRITEBYTECODE
# Suites run several tests at a time, and threads that spin while they wait keep the others from the cores.
export OMP_WAIT_POLICY := PASSIVE

.PHONY: demo lab quick test integration check format notebooks strategies planner same-program witness faults cluster cluster-demo browser gpu cuda-dispatch kaggle kaggle-table soak bench gallery slides docs constraints clean

demo: .venv/notebooks
	$(BIN)/python notebooks/run.py --into build/demo notebooks/01_quickstart.ipynb
	cd build/demo && ../../$(BIN)/labkit compare --last 4 --sort started
	@echo
	@echo "What to try next:"
	@echo "- Make your own predictions, and change the model: make lab opens the notebook that has just run, without its results."
	@echo "- Train with your own script: $(BIN)/labkit launch train.py --nproc-per-node 2 --watch ($(BIN)/labkit write ddp > train.py makes one)"
	@echo "- See what fits before you rent GPUs: $(BIN)/labkit plan fsdp --nproc-per-node 8 --device A100-40 -- --global-batch-size 512"

lab: .venv/notebooks
	$(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) --LabApp.default_url=/lab/tree/01_quickstart.ipynb notebooks

# Unit tests that import torch, start processes or draw whole reports.
SLOW := advice bad_inputs check_settings checking compose data export figures fuzz kaggle many_hosts memory_formulas probe reports sbatch \
	script scripts security source torchrun view

quick: .venv/dev
	$(PYTEST) tests/unit $(SLOW:%=--ignore=tests/unit/test_%.py)

test: .venv/dev
	$(PYTEST) tests/unit tests/integration/test_launch.py tests/integration/test_readme.py

integration: .venv/dev build/vision build/bitsandbytes
	$(PYTEST) tests/integration --ignore=tests/integration/test_launch.py --ignore=tests/integration/test_readme.py

check: .venv/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: .venv/dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# SMALL= runs all: five epochs, six strategies, plans of large models.
SMALL := --small
LABS := notebooks/[0-9]*.ipynb
notebooks: .venv/dev build/vision
	PYTHONPATH=$(CURDIR)/build/vision $(BIN)/python notebooks/run.py --jobs 3 --into build/notebooks $(SMALL) $(LABS)
	$(BIN)/python benchmarks/popular_claims.py build/notebooks/runs --check docs/evidence/popular_claims.md
	$(PYTEST) tests/labs

strategies: .venv/dev
	$(PYTEST) tests/strategies

planner: .venv/dev
	$(PYTEST) tests/planner

same-program: .venv/dev
	$(PYTEST) -n 3 tests/same_program

witness: .venv/dev
	$(PYTEST) -n 3 tests/witness

faults: .venv/dev
	$(PYTEST) -n 3 tests/faults

cluster: .venv/dev
	$(BIN)/python -m pytest tests/cluster

cluster-demo: .venv/dev
	$(BIN)/python tests/cluster/demo.py

browser: .venv/dev
	$(BIN)/python -m pytest tests/browser

GPU_PYTHON ?= $(BIN)/python
gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),.venv/dev)
	PYTHONPATH=$(CURDIR)$(addprefix :,$(PYTHONPATH)) $(GPU_PYTHON) -m pytest -o addopts= -ra tests/gpu # of another environment: no plugins needed

cuda-dispatch: build/cuda/installed
	PYTHONPATH=$(CURDIR) build/cuda/bin/python -m pytest -o addopts= -ra tests/cuda_dispatch

# Beside the environment, whose torch may be a CPU build; labkit itself is found on PYTHONPATH.
build/cuda/installed: constraints.txt
	$(PYTHON) -m venv build/cuda
	build/cuda/bin/python -m pip install --disable-pip-version-check torch==2.14.1 torchvision==0.29.1 timm $(shell \
		sed -n -E '/^(numpy|psutil|pytest|pytest-timeout|transformers)==/p' constraints.txt)
	@touch $@

kaggle: .venv/dev
	$(BIN)/python -m pytest -m kaggle tests/integration/test_kaggle_batch.py

kaggle-table: .venv/dev
	$(BIN)/python benchmarks/kaggle_table.py docs/evidence/kaggle_runs.md

soak: .venv/dev
	PYTHONPATH=$(CURDIR)/build/vision $(BIN)/python -m pytest -m soak -s tests/integration tests/strategies tests/planner tests/same_program tests/faults tests/labs tests/cluster
	$(BIN)/python -m pytest -m soak -s tests/browser

bench: .venv/dev
	$(BIN)/python benchmarks/probe_overhead.py
	$(BIN)/python benchmarks/watched_loop.py

gallery: .venv/dev | build/notebooks
	$(BIN)/python notebooks/pages.py build/notebooks build/gallery/labs
	$(BIN)/python benchmarks/gallery.py build/gallery

slides: .venv/dev | build/notebooks
	$(BIN)/python notebooks/slides.py build/notebooks build/slides.html

docs: .venv/docs
	$(BIN)/python docs/build_site.py

build/notebooks:
	$(MAKE) notebooks

constraints: .venv/dev
	$(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu$$//' | { sed -n '/^#/p' constraints.txt; cat; } > .constraints.new
	mv .constraints.new constraints.txt

clean:
	rm -rf .venv build dist

.venv/notebooks: pyproject.toml notebooks/pyproject.toml constraints.txt | .venv
	$(PIP) --editable ".[notebooks]" --editable notebooks
	@touch $@

.venv/dev: pyproject.toml notebooks/pyproject.toml constraints.txt | .venv
	$(PIP) --editable ".[dev]" --editable notebooks
	@touch $@ .venv/notebooks

build/vision: | .venv/dev
	$(BIN)/python tests/vision_packages.py $@

build/bitsandbytes: | .venv/dev
	$(PIP) --quiet --no-deps --target $@ bitsandbytes==0.50.2

.venv/docs: pyproject.toml constraints.txt | .venv
	$(PIP) --editable ".[docs]"
	@touch $@

.venv:
	@$(PYTHON) -c 'import sys; ok = (3, 11) <= sys.version_info[:2] <= (3, 13); sys.exit(0 if ok else "labkit needs Python 3.11 to 3.13, $(PYTHON) is " + sys.version.split()[0] + "; try make PYTHON=python3.12 $(MAKECMDGOALS)")'
	$(PYTHON) -m venv .venv
