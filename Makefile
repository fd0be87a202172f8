# make demo     serve a real model on this machine
# make test     run the CPU test suite
# make mutants  small wrong changes to the source, each of which the tests have to notice; minutes
# make hostile  calls of the tests of each folder with every wrong argument, which have to be refused or right; minutes
# make matrix   compile every kernel for every architecture, on two Tritons, and run the tests that take long
# make wheel    build sdist and wheel of each version that engines pin, and try them in clean environments
# make types    check types of the examples, the integrations, public modules and the code in documents
# make docs     build the documentation site and open it in a headless browser; needs npm for the browser
# All build .venv first; needs Python 3.10+ and nothing else. TORCH_INDEX=URL names one more index to find torch in.

PYTHON ?= python3
TORCH_INDEX ?=
export TORCH_INDEX
# Tests start a hundred processes: what the first compiles to byte code, the others load.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
# The highest supported Triton, beside the pinned one: kernels are compiled by both.
HIGHEST_TRITON := $(VENV)/triton-highest
PYTEST := OMP_NUM_THREADS=1 FLASHINFER_TEST_TRITON=$(CURDIR)/$(HIGHEST_TRITON) $(BIN)/python -m pytest
HOSTILE := tests/fuzz/test_hostile.py::test_every_change_of_every_argument

.PHONY: demo test mutants hostile matrix wheel types docs clean

demo: $(VENV)/.demo
	@$(BIN)/python -m examples.serve

test: $(VENV)/.test
	@$(PYTEST) --numprocesses 2 --dist worksteal

mutants: $(VENV)/.test
	@$(BIN)/python tests/mutants.py

hostile: $(VENV)/.test
	@$(PYTEST) -m matrix --numprocesses 2 --dist worksteal $(HOSTILE)

matrix: $(VENV)/.test
	@$(PYTEST) -m "matrix and not gpu" --numprocesses 2 --dist worksteal --deselect $(HOSTILE) \
		$$(grep -rl --include='test_*.py' 'mark\.matrix' tests)
	@$(PYTEST) --fuzz 1500 --fuzz-seed 500 --numprocesses 2 --dist worksteal tests/fuzz/test_fuzz.py

wheel: $(VENV)/.test
	@$(BIN)/python tools/wheel.py

types: $(VENV)/.types
	@$(BIN)/python tools/document_code.py
	@$(BIN)/basedpyright --level error

docs: $(VENV)/.docs
	@$(BIN)/python -m mkdocs build --quiet
	@$(BIN)/python tools/browser.py
	@$(PYTEST) -m site tests/site

clean:
	rm -rf $(VENV)

$(VENV)/.demo $(VENV)/.test $(VENV)/.types $(VENV)/.docs: $(VENV)/.%: tools/venv.py constraints.txt pyproject.toml
	@$(PYTHON) tools/venv.py $*
