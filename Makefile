# Two commands on a fresh machine: `make quickstart` and `make test`. Each makes .venv the first time.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH ?= torch==2.13.0
# Options for the program behind a target, as in `make quickstart ARGS="--seed 1"`.
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: quickstart test test-gpu check format clean
.PHONY: bench-overlap bench-shared-prompt bench-weight-sync bench-frozen-weights bench-gpu

quickstart: $(READY)
	$(BIN)/async-rl quickstart $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest

test-gpu: $(READY)
	$(BIN)/python -m pytest -m gpu $(ARGS)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-overlap: $(READY)
	$(BIN)/python -m benchmarks.overlap --json $(ARGS)

bench-shared-prompt: $(READY)
	$(BIN)/python -m benchmarks.shared_prompt --json $(ARGS)

bench-weight-sync: $(READY)
	$(BIN)/python -m benchmarks.weight_sync --json $(ARGS)

bench-frozen-weights: $(READY)
	$(BIN)/python -m benchmarks.frozen_weights --json $(ARGS)

bench-gpu: $(READY)
	$(BIN)/python -m benchmarks.gpu --json $(ARGS)

# torch first and pinned, so that no other package pulls another build of it.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[tasks,dev]"
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache
