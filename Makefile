# Everything that people and machines do here. `make` alone lists it.
#
# PY is the Python that makes the virtual environment, VENV where that lies. Without PY it is the newest that works of
# those that shardc is tested with: each has a lock, locks/python3.N.txt, whose versions are installed.

TESTED := 3.13 3.12 3.11
WORKS = import sys, venv, ssl, ctypes, zlib; sys.exit(sys.version_info[:2] not in [(3, 13), (3, 12), (3, 11)])
found = $(firstword $(foreach p,$(1),$(shell $(p) -c '$(WORKS)' 2>/dev/null && echo $(p))))
PYENV := $(or $(PYENV_ROOT),$(HOME)/.pyenv)
python_of = $(call found,python$(1) $(lastword $(sort $(wildcard $(PYENV)/versions/$(1).*/bin/python))))
ifeq ($(origin PY), undefined)
PY := $(or $(firstword $(foreach v,$(TESTED),$(call python_of,$(v)))),$(call found,python3))
endif
VENV ?= .venv
BIN := $(VENV)/bin
VERSION := $(shell $(or $(wildcard $(BIN)/python),$(PY),false) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
LOCK := locks/python$(VERSION).txt
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist worksteal
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
JOBS ?= 2
ARGS ?=

.PHONY: help demo demo-pipeline demo-processes test turn every oldest everything harnesses processes faults clusters ahead without-rules newest lock lint docs pictures bench gpu clean

help:
	@echo "make demo   train a small GPT-2 on eight fake devices: plan, audit, falling loss, a sample of text"
	@echo "make demo-pipeline   the same in two pipeline stages, each on four of the devices"
	@echo "make demo-processes   both, for 50 steps, in one process and in two: the losses have to be equal"
	@echo "make test   the tests, with a sample of the cases of long ones: 25 to 35 minutes on two cores, the first time the longest"
	@echo "make turn TURN=2   a part of the cases that make test leaves out; the turns 2 to 8 have all of them"
	@echo "make every  all tests, with all cases"
	@echo "make newest make test on the newest releases of everything, whatever the locks say"
	@echo "make everything  lint, docs, make every on the newest and on the oldest Python, harnesses, without-rules: hours"
	@echo "make harnesses   JAX's own cases at random placements, of which the tests run three of each group"
	@echo "make processes   the tests of functions, control flow, random bits, parity ... in 2 processes, of which the tests run a sample"
	@echo "make without-rules   what is found for each operation whose rule is taken away"
	@echo "make faults  100 kills and 20 stops of processes at random times, of which the tests run a few"
	@echo "make clusters   runs under real Slurm, Open MPI and Ray, with lost processes and hosts, in namespaces; needs root, and their packages"
	@echo "make ahead   the compilers of GPUs and TPUs, without one, in .venv-ahead: 5 GB of packages, some 10 minutes"
	@echo "make lock   the lock of PY's version, anew from the newest releases"
	@echo "make lint   ruff and pyright"
	@echo "make docs   the documentation, into site/"
	@echo "make pictures   those of README and docs, anew; needs Chromium"
	@echo "make bench  the benchmarks"
	@echo "make gpu    the benchmark of one GPU, with the packages that PY has: nothing is installed"
	@echo "make clean  remove $(VENV) and what was built"
	@echo "Variables: PY (a Python: 3.11, 3.12 or 3.13; without it the newest that works), VENV, JOBS (test processes), ARGS (more options for the command)"

demo: $(VENV)/.has-examples
	$(BIN)/python -m examples.train --model gpt2 --devices 8 --mesh data=4,model=2 --plan data_tensor --steps 1400 $(ARGS)

demo-pipeline: $(VENV)/.has-examples
	$(BIN)/python -m examples.train --model gpt2 --devices 8 --mesh pipe=2,data=2,model=2 --plan pipeline --steps 1400 $(ARGS)

demo-processes: $(VENV)/.has-examples
	$(BIN)/python -m examples.processes $(ARGS)

test: $(VENV)/.has-dev
	$(PYTEST) --turn 1 $(ARGS)

turn: $(VENV)/.has-dev
	$(PYTEST) --turn $(TURN) $(ARGS)

every: $(VENV)/.has-dev
	$(PYTEST) $(ARGS)

oldest:
	@echo "$(call python_of,$(lastword $(TESTED)))"

newest:
	@echo "the newest releases, on $$($(PY) --version)"
	rm -rf .venv-newest
	$(PY) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --editable ".[dev]"
	.venv-newest/bin/python -m pip list --format=freeze | grep -iE "^(jax|jaxlib|numpy|scipy|flax|optax)=="
	.venv-newest/bin/python -m pytest -n $(JOBS) --dist worksteal --turn 1 $(ARGS)

lock:
	rm -rf .venv-lock
	$(PY) -m venv .venv-lock
	.venv-lock/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[dev,docs]"
	@v=$$(.venv-lock/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])'); { \
	echo "# The versions that shardc is tested with on Python $$v: constraints for pip (-c). Made by make lock PY=python$$v."; \
	.venv-lock/bin/python -m pip freeze --exclude-editable; } > locks/python$$v.txt
	rm -rf .venv-lock

everything: lint docs every harnesses without-rules
	$(MAKE) every PY="$(call python_of,$(lastword $(TESTED)))" VENV=.venv-oldest

harnesses: $(VENV)/.has-dev
	$(BIN)/python -m tests.harnesses $(ARGS)

processes: $(VENV)/.has-dev
	$(BIN)/python -m tests.processes $(ARGS)

without-rules: $(VENV)/.has-dev
	$(BIN)/python -m tests.sbp.without_rule $(ARGS)

lint: $(VENV)/.has-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: export NO_MKDOCS_2_WARNING := 1
docs: $(VENV)/.has-docs
	$(BIN)/mkdocs build --strict --quiet $(ARGS)

pictures: $(VENV)/.has-dev
	$(BIN)/python -m scripts.pictures

bench: $(VENV)/.has-examples
	$(BIN)/python -m benchmarks.run $(ARGS)

faults: $(VENV)/.has-dev
	$(BIN)/python -m tests.processes.faults --jobs $(JOBS) $(ARGS)

clusters: $(VENV)/.has-dev
	$(BIN)/python -m scripts.clusters $(ARGS)

ahead:
	@$(MAKE) VENV=.venv-ahead .venv-ahead/.has-dev .venv-ahead/.has-cuda .venv-ahead/.has-tpu
	.venv-ahead/bin/python -m pytest tests/whole/test_ahead.py $(ARGS)

gpu:
	PYTHONPATH=. $(PY) -m benchmarks.gpu $(ARGS)

clean:
	rm -rf $(VENV) .venv-oldest .venv-newest .venv-lock .venv-ahead site .pytest_cache .ruff_cache .hypothesis .cache

$(BIN)/python:
	@test -n "$(PY)" || { echo "shardc wants Python 3.11, 3.12 or 3.13, with venv; found none. Say where one is: make PY=/path/to/python3"; exit 1; }
	@echo "$(VENV): $$($(PY) --version) at $$(command -v $(PY)), jax $$(sed -n 's/^jax==//p' $(LOCK))"
	@$(PY) -m venv $(VENV)

$(LOCK):
	@echo "there is no $@: shardc is tested with Python $(TESTED). Take one of these, make PY=python3.13, or make newest"; exit 1

# .has-dev: the extra "dev" is installed, as pyproject.toml and the lock are now.
$(VENV)/.has-%: pyproject.toml $(LOCK) | $(BIN)/python
	@echo "installing shardc[$*] into $(VENV), as $(LOCK) says"
	@$(PIP) --constraint $(LOCK) --editable ".[$*]"
	@touch $@
