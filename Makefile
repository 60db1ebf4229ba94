# Everything that people and machines do here. `make` alone lists it.
#
# PY is the Python that makes the virtual environment, VENV where that lies. Versions are those of requirements.lock.

PY ?= $(firstword $(foreach p,python3 python3.11 python3.12 python3.13 python3.14,$(shell \
	$(p) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(p))))
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint requirements.lock
JOBS ?= 2
ARGS ?=

.PHONY: help demo demo-pipeline test quick parity harnesses lint docs bench gpu clean

help:
	@echo "make demo   train a small GPT-2 on eight fake devices: plan, audit, falling loss, a sample of text"
	@echo "make demo-pipeline   the same in two pipeline stages, each on four of the devices"
	@echo "make test   the whole test suite"
	@echo "make quick  the tests that are not marked slow"
	@echo "make parity every plan, schedule, model and mesh of the parity with one device, of which the suite runs a sample"
	@echo "make harnesses   JAX's own cases at random placements, of which the suite runs a sample"
	@echo "make lint   ruff and pyright"
	@echo "make docs   the documentation, into site/"
	@echo "make bench  the benchmarks"
	@echo "make gpu    the benchmark of one GPU, with the packages that PY has: nothing is installed"
	@echo "make clean  remove $(VENV) and what was built"
	@echo "Variables: PY (a Python, 3.11 or newer), VENV, JOBS (test processes), ARGS (more options for the command)"

demo: $(VENV)/.has-examples
	$(BIN)/python -m examples.train --model gpt2 --devices 8 --mesh data=4,model=2 --plan data_tensor --steps 400 $(ARGS)

demo-pipeline: $(VENV)/.has-examples
	$(BIN)/python -m examples.train --model gpt2 --devices 8 --mesh pipe=2,data=2,model=2 --plan pipeline --steps 400 $(ARGS)

test: $(VENV)/.has-dev
	$(BIN)/python -m pytest -n $(JOBS) $(ARGS)

quick: $(VENV)/.has-dev
	$(BIN)/python -m pytest -n $(JOBS) -m "not slow" $(ARGS)

parity: $(VENV)/.has-dev
	$(BIN)/python -m pytest -n $(JOBS) --every-case tests/test_parity.py tests/test_pipeline_parity.py $(ARGS)

harnesses: $(VENV)/.has-dev
	$(BIN)/python -m tests.harnesses $(ARGS)

lint: $(VENV)/.has-dev
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: export NO_MKDOCS_2_WARNING := 1
docs: $(VENV)/.has-docs
	$(BIN)/mkdocs build --strict --quiet $(ARGS)

bench: $(VENV)/.has-examples
	$(BIN)/python -m benchmarks.run $(ARGS)

gpu:
	PYTHONPATH=. $(PY) -m benchmarks.gpu $(ARGS)

clean:
	rm -rf $(VENV) site .pytest_cache .ruff_cache .hypothesis

$(BIN)/python:
	@test -n "$(PY)" || { echo "shardc wants Python 3.11 or newer; say which with make PY=/path/to/python3"; exit 1; }
	$(PY) -m venv $(VENV)

# .has-dev: the extra "dev" is installed, as pyproject.toml and the lock are now.
$(VENV)/.has-%: pyproject.toml requirements.lock | $(BIN)/python
	@echo "installing shardc[$*] into $(VENV)"
	@$(PIP) --editable ".[$*]"
	@touch $@
