# make test      lint, types and the quick tests, in a fresh .venv
# make test-all  the same with the slow tests, and those of copies once more with short pieces
# make docs      the documentation as a site, in site/
# make demo      pretrain a small Llama on the embedded corpus, swap on (CPU is enough, no network but a package index)
# make versions  the quick tests with the oldest releases, those that fine-tuning tools pin, and the newest
# make tools     trainings inside LLaMA-Factory, ms-swift and Axolotl, with a plan and without (an hour)
# make oldest    the quick tests with the oldest PyTorch and transformers (gigabytes: that PyTorch brings CUDA along)
# make peers     TRL's and PEFT's own tests with a plan on every model (an hour)
# make gpu       tests and benchmarks that need an accelerator, in the current Python
# make gpu-carry libraries that are measured beside ours, and HiGHS, to be carried to a machine without an index
# make sanitize  a small case under compute-sanitizer (make gpu does it too, where the tool is found)
# make promise   does what `hf-actswap plan` promises come true: trainings on rehearsed devices (hours for all rows)
# make rehearse  the tests that need a GPU, on a rehearsal's device (gigabytes: PyTorch's CUDA build; no GPU)
# make clean     remove the environments and the caches
#
# PYTHON chooses the interpreter (3.11 or newer):  make test PYTHON=python3.12

PYTHON ?= python3
# Tests start many processes, and pytest rewrites each of their files: compiled modules are kept, whatever the shell says.
unexport PYTHONDONTWRITEBYTECODE
VENV := .venv
BIN := $(VENV)/bin
OLDEST := .venv-oldest
VERSIONS := .venv-versions
TOOLS := .venv-tools
REHEARSAL := .venv-rehearsal
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# Three processes for two cores, at most 8, because some wait for ranks; whole files: what a file sets up is set up once.
WORKERS = $(shell $(PYTHON) -c 'import os; cores = os.cpu_count() or 2; print(min(cores + cores // 2, 8))')
ON_ALL_CORES = --numprocesses $(WORKERS) --dist loadfile
PYTEST = $(BIN)/python -m pytest $(ON_ALL_CORES)
# Streams, swap and host sequences, once more with blocks of host memory that are copied in pieces of 4 KiB.
IN_PIECES := tests/stream tests/engine/pitfalls $(addprefix tests/engine/test_,apply.py bitwise.py bytes.py \
	cached_traces.py copies.py faults.py happens_before.py kept_inside.py writes_in_place.py packed_rows.py \
	random_orders.py recompute_input.py recompute_matrix.py release.py saved_bytes.py windows.py with_moe.py)
# The settings of pyproject.toml without --strict-config and --strict-markers.
NOT_STRICT := -m pytest -o addopts="--import-mode=importlib -ra"

.PHONY: test test-all measure-tests versions tools oldest lint types docs demo peers gpu gpu-carry sanitize rehearse promise clean
.DELETE_ON_ERROR:
.PRECIOUS: $(VERSIONS)/%/.dev

test: lint types
	$(PYTEST) -m "not slow and not gpu"

# Which tests are too slow for `make test`, measured anew: tests/slow_tests.txt.
measure-tests:
	$(PYTEST) -m "not slow and not gpu" --measure

test-all: lint types
	$(PYTEST)
	$(PYTEST) --piece-bytes 4096 $(IN_PIECES) -m "not gpu"
	$(MAKE) --no-print-directory version-least

# The releases that are tested together; PyTorch is that of constraints.txt, but for the newest. The middle ones are
# what LLaMA-Factory 0.9.5 and Axolotl 0.19 pin. docs/versions.md has the results.
RELEASES_least := torch==2.13.0 transformers==5.2.0 accelerate==1.10.1 peft==0.18.1 trl==0.24.0
RELEASES_llamafactory := torch==2.13.0 transformers==5.6.0 accelerate==1.11.0 peft==0.18.1 trl==0.24.0
RELEASES_axolotl := torch==2.13.0 transformers==5.16.1 accelerate==1.13.0 peft==0.20.0 trl==1.9.0
RELEASES_newest := torch==2.14.* transformers==5.24.* accelerate peft trl==1.16.*
versions: version-least version-llamafactory version-axolotl version-newest

version-%: $(VERSIONS)/%/.dev
	$(VERSIONS)/$*/bin/python $(NOT_STRICT) $(ON_ALL_CORES) -m "not slow and not gpu"

# Each tool by its own pins, in an environment of its own: its command lines, SFT and DPO, one process and two.
tools: $(VENV)/.dev
	$(BIN)/python tests/tools/run.py --environments $(TOOLS) --work $(TOOLS)/work

oldest: $(OLDEST)/.dev
	$(OLDEST)/bin/python $(NOT_STRICT) $(ON_ALL_CORES) -m "not slow and not gpu"

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

# MkDocs 1 is what the pinned theme builds on; its word about MkDocs 2 is no news here.
docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

demo: $(VENV)/.run
	$(BIN)/accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
		recipes/llama_swap.py recipes/sample_cpu.yaml --dataset sample

# Their tests come from source distributions; models and data are made here.
peers: $(VENV)/.torch pyproject.toml
	$(PIP_INSTALL) --editable '.[peers]'
	$(BIN)/python tests/peers/run.py

# Not strict: pytest-timeout, whose setting and marker the tests use, may not be installed there.
ON_GPU = $(PYTHON) $(NOT_STRICT)
SANITIZED = compute-sanitizer --tool memcheck --error-exitcode 1
FOR_SANITIZER = $(ON_GPU) tests/engine/test_gpu_stress.py -k for_the_sanitizer
# All stages one after the other, each under nine minutes: what is in the results is not measured again. What one
# of them finds does not stop the next.
gpu:
	@status=0; \
	$(PYTHON) benchmarks/gpu_day.py || status=1; \
	if command -v compute-sanitizer; then $(MAKE) --no-print-directory sanitize || status=1; \
	else echo "compute-sanitizer is not on the PATH (it comes with the CUDA toolkit): that check is left out"; fi; \
	$(PYTHON) benchmarks/verdict.py || status=1; \
	exit $$status

# For the Python of that machine, without what they depend on: benchmarks/README.md says how they are used.
gpu-carry:
	$(PYTHON) -m pip install --quiet --target gpu-carry --upgrade --no-compile --no-deps --only-binary :all: \
		--python-version 3.12 --constraint constraints.txt trl liger-kernel highspy

# Twice: every tensor memory of its own, so that nothing outside of one is touched unseen; and memory that is
# given and taken in the order of streams, where what another stream still uses must not be given back. Its
# racecheck looks at shared memory inside kernels, and there are no kernels of ours.
sanitize:
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(SANITIZED) $(FOR_SANITIZER)
	PYTORCH_ALLOC_CONF=backend:cudaMallocAsync $(SANITIZED) --track-stream-ordered-races all $(FOR_SANITIZER)

# Values of all tensors are computed on the CPU, and copies are carried out as late as may be; the tests of the
# device itself choose each order in turn. Some steps are too large to compute: there only small tensors have
# values. Each of the two processes has a device of its own. Files are named: to import all tests takes a minute.
REHEARSED := $(REHEARSAL)/bin/python -m hf_actswap.rehearsal
REHEARSED_TESTS := $(REHEARSAL)/bin/python $(NOT_STRICT) --numprocesses 2 --dist worksteal
REHEARSED_FILES = $(shell grep -rlE 'mark\.(gpu|rehearsal)\b' tests --include='test_*.py')
SMOKE := tests/engine/test_device_smoke.py
TIMED := tests/engine/test_gpu.py tests/engine/test_link.py $(SMOKE)
TOO_LARGE_FILES := tests/planner/test_gpu_planner.py tests/planner/test_gpu_guard.py
TOO_LARGE_TO_COMPUTE := $(TOO_LARGE_FILES) $(addprefix $(SMOKE)::test_,a_row_of_the_planner \
	a_training_survives_six_tenths_of_its_memory) $(addprefix tests/engine/test_gpu_stress.py::test_, \
	little_more_is_reserved_than_allocated gradients_survive_when_memory_is_short)
rehearse: $(REHEARSAL)/.dev
	@status=0; \
	$(REHEARSED) --arithmetic all -- $(REHEARSED_TESTS) -m "gpu or rehearsal" \
		$(filter-out $(TOO_LARGE_FILES),$(REHEARSED_FILES)) || status=1; \
	$(REHEARSED) --arithmetic small --clock -- $(REHEARSED_TESTS) $(TOO_LARGE_TO_COMPUTE) || status=1; \
	$(REHEARSED) --arithmetic all --clock -- $(REHEARSED_TESTS) $(TIMED) || status=1; \
	for seed in 1 2; do $(REHEARSED) --arithmetic all --order random --seed $$seed -- \
		$(REHEARSED_TESTS) tests/engine/test_gpu.py || status=1; done; \
	exit $$status

# README.md's rows by default; ROWS= for all, ROWS="--only 8b lora" for some.
ROWS ?= --known
promise: $(REHEARSAL)/.dev
	$(REHEARSAL)/bin/python benchmarks/promise.py $(ROWS) --out benchmarks/results/promise.json

clean:
	rm -rf $(VENV) $(OLDEST) $(VERSIONS) $(TOOLS) $(REHEARSAL) gpu-carry build dist site .hypothesis .mypy_cache .pytest_cache .ruff_cache *.egg-info
	find . -name __pycache__ -not -path './.git/*' -type d -prune -exec rm -rf {} +

# torch first and alone: a CPU wheel that the index configuration offers is then taken as it is.
$(VENV)/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(f"Python 3.11 or newer is needed, found {sys.version}" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) torch
	touch $@

$(VENV)/.run: $(VENV)/.torch pyproject.toml
	$(PIP_INSTALL) --editable '.[recipes]'
	touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	$(PIP_INSTALL) --editable '.[dev]'
	touch $@

$(VERSIONS)/%/.dev: pyproject.toml
	$(PYTHON) -m venv $(VERSIONS)/$*
	$(VERSIONS)/$*/bin/python -m pip install --quiet $(firstword $(RELEASES_$*))
	$(VERSIONS)/$*/bin/python -m pip install --quiet $(RELEASES_$*) --editable '.[test]'
	touch $@

$(OLDEST)/.dev: pyproject.toml
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet 'torch==2.11.*' 'transformers==5.2.*' 'accelerate==1.10.*' --editable '.[test]'
	touch $@

# The CUDA build from the package index, also where the index configuration offers another.
$(REHEARSAL)/.dev: pyproject.toml
	$(PYTHON) -m venv $(REHEARSAL)
	@$(REHEARSAL)/bin/python -m pip install --quiet 'torch==2.11.*' 'transformers==5.17.*' --editable '.[test]' \
		&& $(REHEARSAL)/bin/python -c 'import torch; assert torch.version.cuda' \
		|| { echo "make rehearse needs PyTorch's CUDA build, which cannot be installed here"; exit 1; }
	touch $@
