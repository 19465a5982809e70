# Every target sets up what it needs, in a virtual environment of its own (.venv), the first time it is asked for.
#
#   make demo                    a webhook bot, restarted, and killed in the middle of a turn (MODEL=gpt-4o asks a model)
#   make test                    the tests, with coverage (ARGS="-k pruning --no-cov" goes on to pytest), on SQLite and on a
#                                PostgreSQL server that they start (CHATFLOW_TEST_POSTGRES=postgresql://... names another)
#   make slow                    the tests that take minutes
#   make faults                  real processes, and a PostgreSQL server, killed and robbed of their disk for seven minutes; prints a table
#   make lint, types, format     the gates; format mends what ruff can mend
#   make docs                    the documentation as a site, into build/docs; a broken link is an error
#   make picture                 docs/pictures/chat.svg anew: a real conversation at a terminal, killed and gone on with
#   make dist                    wheel and sdist in dist/, looked at, and installed and run in an environment of their own
#   make bench                   beside other packages, in about ten minutes (ARGS="--themes turn load --scale 1 --seconds 1")
#   make bench-micro             what single functions cost
#   make clean                   away with .venv and all caches
#
# PYTHON=/path/to/python picks the interpreter; else it is the first one found that is 3.11 or newer and can make a venv.

VENV := .venv
RUN := $(VENV)/bin/python -m
PYTHONS := $(or $(PYTHON),python3.11 python3.12 python3.13 python3 python3.14 python)
SCRIPTS := $(wildcard examples/*.py)
PEERS := build/peers
TESTING := LITELLM_LOCAL_MODEL_COST_MAP=True $(RUN) pytest -n 2

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
# What the caller's shell points to must not shadow what .venv holds.
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV

.PHONY: demo test slow faults lint format types docs picture dist bench bench-micro clean
.DEFAULT_GOAL := test
.DELETE_ON_ERROR:
# Two installations in one environment at the same time would spoil it.
.NOTPARALLEL:

demo: $(VENV)/.has-examples
	@$(VENV)/bin/python examples/demo.py

test: $(VENV)/.has-tests
	$(TESTING) --cov --cov-report=term $(ARGS)

slow: $(VENV)/.has-tests $(VENV)/.has-peers
	$(TESTING) -m slow -o timeout=1800 $(ARGS)

# ARGS="--seed 5 --seconds 60" picks the seed and the time; --markdown prints the table for the documentation.
faults: $(VENV)/.has-tests
	LITELLM_LOCAL_MODEL_COST_MAP=True $(RUN) tests.faults $(ARGS)

lint: $(VENV)/.has-lint
	$(RUN) ruff check
	$(RUN) ruff format --check

format: $(VENV)/.has-lint
	$(RUN) ruff check --fix
	$(RUN) ruff format

types: $(VENV)/.has-typing
	$(RUN) mypy chatflow tests conftest.py benchmarks $(SCRIPTS)
	$(RUN) pyright --pythonpath $(VENV)/bin/python

docs: $(VENV)/.has-docs
	$(RUN) sphinx -W --keep-going -E -q docs build/docs
	@echo "build/docs/index.html"

picture: $(VENV)/.has-picture
	$(VENV)/bin/python docs/pictures/record.py

dist: $(VENV)/.has-dist
	rm -rf dist
	$(RUN) build --outdir dist
	$(RUN) twine check --strict dist/*
	$(RUN) tests.packages

bench: $(VENV)/.has-bench $(PEERS)/.has-bench-peers
	$(RUN) benchmarks $(ARGS)

bench-micro: $(VENV)/.has-bench
	@mkdir -p build/bench
	$(RUN) pytest benchmarks/micro --no-cov -p no:xdist -p no:cacheprovider --benchmark-sort=fullname \
	  --benchmark-columns=min,median,iqr,rounds --benchmark-json=build/bench/micro.json $(ARGS)

clean:
	rm -rf $(VENV) .benchmarks .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.* build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp a dependency group: the package itself, editable, and what the group names.
$(VENV)/.has-%: pyproject.toml $(VENV)/.made
	@echo "Installing chatflow and its '$*' group into $(VENV) ..."
	@$(RUN) pip install --quiet --editable . --group $*
	@touch $@

# What chatflow is compared with can't all be installed beside it.
$(PEERS)/.has-bench-peers: pyproject.toml $(VENV)/.made
	@echo "Installing the packages to compare with into $(PEERS) ..."
	@$(RUN) venv --clear $(PEERS)
	@$(PEERS)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	@$(PEERS)/bin/python -m pip install --quiet --group bench-peers
	@touch $@

# The pip that comes with Python 3.11 and 3.12 knows no dependency groups: 25.1 does.
$(VENV)/.made:
	@for python in $(PYTHONS); do \
	  if "$$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "Making $(VENV) with $$("$$python" --version) ..."; \
	    rm -rf $(VENV) && "$$python" -m venv $(VENV) && $(RUN) pip install --quiet --upgrade 'pip>=25.1' && touch $@; \
	    exit; \
	  fi; \
	done; \
	echo "chatflow needs Python 3.11 or newer with its venv module; none of these is: $(PYTHONS)" >&2; exit 1
