# make test      lint, types and the quick tests, in a fresh .venv
# make test-all  the same with the slow tests
# make docs      the documentation as a site, in site/
# make demo      pretrain a small Llama on the embedded corpus, swap on (CPU is enough, no network but a package index)
# make oldest    the quick tests with the oldest PyTorch and transformers (gigabytes: that PyTorch brings CUDA along)
# make gpu       tests and benchmarks that need an accelerator, in the current Python
# make sanitize  a small case under compute-sanitizer (make gpu does it too, where the tool is found)
# make clean     remove the environments and the caches
#
# PYTHON chooses the interpreter (3.11 or newer):  make test PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OLDEST := .venv-oldest
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# A process for each core, whole files: what a file sets up is set up once.
ON_ALL_CORES := --numprocesses auto --maxprocesses 8 --dist loadfile
PYTEST := $(BIN)/python -m pytest $(ON_ALL_CORES)
# The settings of pyproject.toml without --strict-config and --strict-markers.
NOT_STRICT := -m pytest -o addopts="--import-mode=importlib -ra"

.PHONY: test test-all oldest lint types docs demo gpu sanitize clean
.DELETE_ON_ERROR:

test: lint types
	$(PYTEST) -m "not slow and not gpu"

test-all: lint types
	$(PYTEST)

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

# Not strict: pytest-timeout, whose setting and marker the tests use, may not be installed there.
ON_GPU = $(PYTHON) $(NOT_STRICT)
SANITIZED = compute-sanitizer --tool memcheck --error-exitcode 1
FOR_SANITIZER = $(ON_GPU) tests/engine/test_gpu_stress.py -k for_the_sanitizer
# All stages one after the other, each under eight minutes: what is in the results is not measured again. What one
# of them finds does not stop the next.
gpu:
	@status=0; \
	$(PYTHON) benchmarks/gpu_day.py || status=1; \
	if command -v compute-sanitizer; then $(MAKE) --no-print-directory sanitize || status=1; \
	else echo "compute-sanitizer is not on the PATH (it comes with the CUDA toolkit): that check is left out"; fi; \
	$(PYTHON) benchmarks/verdict.py || status=1; \
	exit $$status

# Twice: every tensor memory of its own, so that nothing outside of one is touched unseen; and memory that is
# given and taken in the order of streams, where what another stream still uses must not be given back. Its
# racecheck looks at shared memory inside kernels, and there are no kernels of ours.
sanitize:
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(SANITIZED) $(FOR_SANITIZER)
	PYTORCH_ALLOC_CONF=backend:cudaMallocAsync $(SANITIZED) --track-stream-ordered-races all $(FOR_SANITIZER)

clean:
	rm -rf $(VENV) $(OLDEST) build dist site .hypothesis .mypy_cache .pytest_cache .ruff_cache *.egg-info
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

$(OLDEST)/.dev: pyproject.toml
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet 'torch==2.11.*' 'transformers==5.17.*' --editable '.[test]'
	touch $@
