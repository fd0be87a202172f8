# make demo    serve a real model on this machine
# make test    run the CPU test suite
# Both build .venv first; needs Python 3.10+ and nothing else.

PYTHON ?= python3
# Where pip finds the CPU build of torch, if the indexes that it is configured with have none.
TORCH_INDEX ?=
TORCH := torch==2.13.0+cpu

VENV := .venv
BIN := $(VENV)/bin
# The highest supported Triton, beside the pinned one: kernels are compiled by both.
HIGHEST_TRITON := $(VENV)/triton-3.9
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet install --constraint constraints.txt

.PHONY: demo test clean

demo: $(VENV)/.demo
	$(BIN)/python -m examples.serve

test: $(VENV)/.test
	OMP_NUM_THREADS=1 FLASHINFER_TEST_TRITON=$(CURDIR)/$(HIGHEST_TRITON) $(BIN)/python -m pytest --numprocesses 2 --dist worksteal

clean:
	rm -rf $(VENV)

$(VENV)/.torch: constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 10), "needs Python 3.10 or newer"'
	@echo "building $(VENV), once; this takes a few minutes"
	$(PYTHON) -m venv $(VENV)
	@$(PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $(TORCH) setuptools || { \
	    echo "pip found no $(TORCH): give the index of PyTorch's CPU wheels as TORCH_INDEX=..."; exit 1; }
	touch $@

# The build runs in .venv with the pinned setuptools, and torch is there already: nothing here can replace it.
$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(PIP) --no-build-isolation --editable '.[demo]'
	touch $@

$(VENV)/.test: $(VENV)/.torch pyproject.toml
	$(PIP) --no-build-isolation --editable '.[dev]'
	$(BIN)/python -m pip --disable-pip-version-check --quiet install --no-deps --upgrade --target $(HIGHEST_TRITON) \
	    triton==3.9.0
	touch $@
