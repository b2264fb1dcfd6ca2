# Everything a fresh machine needs: `make verify` and `make test` set up .venv on their own.
PYTHON ?= python3
BIN := .venv/bin
REPORT := report

.PHONY: verify test lint format build gpu gate controls screenshots clean

verify: .venv/installed  ## the main job: the mixture-of-experts layer on 4 ranks
	$(BIN)/verify run moe --ranks 4 --report $(REPORT)

test: .venv/installed  ## all tests, on all cores
	$(BIN)/python -m pytest -n auto --dist loadfile

lint: .venv/installed  ## formatting, rules and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

build: .venv/installed  ## every kernel, compiled without a GPU; fails on a spill
	$(BIN)/mok build --arch sm_90a

gpu: .venv/installed  ## what needs a GPU: tests, speed, planted faults, peers; cut off after 8 minutes
	bash ci/gpu.sh

gate: .venv/installed  ## controls, then the cases of ci/gate.toml; SINCE=REV asks for changed sources
	$(BIN)/verify gate $(if $(SINCE),--since $(SINCE)) --report $(REPORT)/gate

controls: .venv/installed  ## does the verifier catch the faults that it says it catches?
	$(BIN)/verify controls

screenshots: .venv/installed  ## a passing and a failing run, their reports as pictures in docs/
	$(BIN)/python ci/screenshots.py

.venv/installed: pyproject.toml setup.py ci/constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed; call make PYTHON=python3.x")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c ci/constraints.txt -e '.[test,lint,cuda]'
	touch $@

clean:
	rm -rf .venv build *.egg-info $(REPORT) .pytest_cache .mypy_cache .ruff_cache .hypothesis
