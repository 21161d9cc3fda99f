# The commands of everyday work; `make` alone lists them.

# Pythons to try, the first that is new enough wins: make setup PYTHON=python3.12
PYTHON = python3 python3.13 python3.12 python3.11

VENV = .venv
STAMP = $(VENV)/.installed
STARTED = $(VENV)/.started
RUN = $(VENV)/bin/python -m
PINS = requirements-dev.txt
INSTALL = trap 'exit 130' INT TERM; \
  $(RUN) pip --quiet --disable-pip-version-check install --constraint $(PINS)
OR_GIVE_UP = || { [ $$? -gt 128 ] || rm -f $(STARTED); exit 1; }
TORCH_CPU = https://download.pytorch.org/whl/cpu
ASK_TORCH_CPU = 'import signal, urllib.request as u; signal.alarm(3); u.urlopen("$(TORCH_CPU)/torch/")'

.DEFAULT_GOAL = help
.PHONY: help demo setup test test-all lint format clean

help: ## list these targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1	\2/p' $(MAKEFILE_LIST)

demo: $(STAMP) ## set up, then show the whole story in about a minute
	$(RUN) samo demo

setup: $(STAMP) ## create .venv with everything development needs

test: lint ## check format, lint and types, then run the tests
	OMP_NUM_THREADS=1 $(RUN) pytest -m "not long" --numprocesses 3 --dist worksteal --durations=10

test-all: lint ## the same with the tests that take long, and new random examples
	OMP_NUM_THREADS=1 $(RUN) pytest --hypothesis-profile random --numprocesses 3 --dist worksteal --durations=10

lint: $(STAMP) ## check format, lint and types
	$(RUN) ruff format --check
	$(RUN) ruff check
	$(RUN) mypy

format: $(STAMP) ## rewrite the code in the house format, with the safe fixes of the linter
	$(RUN) ruff check --fix-only
	$(RUN) ruff format

clean: ## remove .venv, caches and builds
	rm -rf $(VENV) .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist
	find benchmarks src tests -name __pycache__ -prune -exec rm -rf {} +

# STARTED lies in the environment from the first command to the last, where it becomes the stamp. One
# found there belongs to a set-up that was interrupted, and nothing in that environment is trusted.
# Where pip itself gave up (no network, a slip in pyproject.toml), what is installed is sound and stays.
$(STAMP): pyproject.toml $(PINS)
	@if [ -e $(STARTED) ]; then echo "$(VENV): redoing an interrupted set-up"; rm -rf $(VENV); fi
	@mkdir -p $(VENV) && rm -f $@ && touch $(STARTED)
	@set -e; if [ ! -x $(VENV)/bin/python ]; then \
	  for python in $(PYTHON) ""; do \
	    if [ -z "$$python" ]; then \
	      echo "no Python 3.11 or newer with venv among: $(PYTHON);" \
	        "install one, or name it: make setup PYTHON=/path/to/python" >&2; \
	      rm -rf $(VENV); exit 1; \
	    fi; \
	    if "$$python" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' \
	      2>/dev/null; then break; fi; \
	  done; \
	  echo "$(VENV): creating it with $$("$$python" --version)"; \
	  "$$python" -m venv $(VENV); \
	fi
# torch goes first and alone, by its exact version. Without an NVIDIA GPU its CPU build saves some GB of
# CUDA packages; not every network reaches the index of that build, so ask it first, for 3 s at most.
	@torch=$$(grep '^torch==' $(PINS)); index=; \
	if nvidia-smi -L >/dev/null 2>&1; then :; \
	elif $(VENV)/bin/python -c $(ASK_TORCH_CPU) >/dev/null 2>&1; then \
	  index="--extra-index-url $(TORCH_CPU)"; \
	fi; \
	echo "$(VENV): installing $$torch $$index"; \
	$(INSTALL) $$index "$$torch" hatchling $(OR_GIVE_UP)
	@echo "$(VENV): installing samo and its tools"
	@$(INSTALL) --no-build-isolation --editable '.[dev]' $(OR_GIVE_UP)
	@touch $(STARTED) && mv $(STARTED) $@
	@echo "$(VENV): ready"
