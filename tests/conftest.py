"""What every test has: small models, few threads, no hub."""

import gc
import os
import random
import signal
import socketserver
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import hypothesis
import torch

from async_rl.errors import ConfigError
from async_rl.shared.cpu.reproducible import use_reproducible_products
from tests.support.fresh_seed import fresh_seed
from tests.support.process_gate import ProcessGate
from tests.support.tiers import ALWAYS, beyond_a_cover, is_nightly, spread
from tests.support.tiny_model import make_tiny_model
from tests.support.warm.client import WarmStarts

if TYPE_CHECKING:
    from trainer.parallel import Parallel

torch.set_num_threads(1)

# How long an example takes says more about the machine than about the code.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")

# A tenth of what collecting tests takes; see `pytest_collection_finish`.
gc.disable()

# For tests of exact mode: a process chooses its kernels before it computes anything.
with suppress(ConfigError):
    use_reproducible_products()

# Under nohup, and in the background of a shell, all that tests start would ignore these, too: unlike that, a handler is
# not inherited.
for number in (signal.SIGHUP, signal.SIGINT):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, lambda *_: None)

# Threads of a test's own server outlive it, and capturing standard error is of the whole process: who hangs up in one
# test would otherwise be told in the output that another one reads.
_tell_error = socketserver.BaseServer.handle_error


def _tell_all_but_hang_ups(self: socketserver.BaseServer, request: object, client: object) -> None:
    if not isinstance(sys.exception(), ConnectionError):
        _tell_error(self, request, client)  # type: ignore[arg-type]


socketserver.BaseServer.handle_error = _tell_all_but_hang_ups  # type: ignore[assignment,method-assign]

LEFT_OUT_OR_ALL = {"nightly", "devices", "layouts", ALWAYS}

GATE = ProcessGate()
WARM = WarmStarts(None, os.environ)
WARM.install()


def marks_of(item: pytest.Item) -> set[str]:
    return {marker.name for marker in item.iter_markers()}


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None]:
    """Says what `make test` and `make test-fast` leave out before markers are selected by, and orders what several
    workers run."""
    for item in items:
        if is_nightly(item.path, marks_of(item)):
            item.add_marker("nightly")
        if "parallel" in getattr(item, "fixturenames", ()):
            item.add_marker("computes")
    for item in _beyond_covers(items):
        item.add_marker("nightly")
    yield
    if "PYTEST_XDIST_WORKER" in os.environ:
        place = spread(dict.fromkeys(item.path for item in items))
        items.sort(key=lambda item: place[item.path])


def pytest_collection_finish() -> None:
    """What has been imported stays: no collection of garbage goes through it again."""
    gc.freeze()
    gc.enable()


def _beyond_covers(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Of each test with several parameters, what `make test` does not need to have each of their values once."""
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and not LEFT_OUT_OR_ALL & marks_of(item):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        for place in beyond_a_cover([case.callspec._idlist for case in cases]):
            yield cases[place]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None]:
    """Before the first fixture of a test is made, those of its module and session included."""
    markers = marks_of(item)
    GATE.close(item.nodeid, markers)
    WARM.is_on = "cold" not in markers
    yield
    GATE.require_none_refused()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call() -> Generator[None]:
    yield
    GATE.require_none_refused()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown() -> Generator[None]:
    try:
        yield
    finally:
        GATE.open()
    GATE.require_none_refused()


@pytest.fixture
def process_gate() -> ProcessGate:
    return GATE


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_model("qwen3", tied=True, seed=1)` -> directory of a random checkpoint, made once per session."""
    made: dict[tuple[object, ...], Path] = {}

    def get(family: str = "qwen3", **options: int) -> Path:
        key = (family, *sorted(options.items()))
        if key not in made:
            made[key] = make_tiny_model(tmp_path_factory.mktemp(family), family, **options)
        return made[key]

    return get


@pytest.fixture
def rng() -> random.Random:
    """Fresh in every test, torch's generator too."""
    return random.Random(fresh_seed())


@pytest.fixture(scope="session")
def reproducible_products() -> None:
    """Leaves tests of exact mode out on processors that it refuses."""
    try:
        use_reproducible_products()
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def parallel() -> Iterator["Parallel"]:
    """The one process group of this process: the trainer's and the benchmarks' tests share it."""
    # Megatron, which takes seconds to import and which most tests do without.
    from async_rl.config.trainer_section import TrainerSection
    from trainer.devices import choose_device
    from trainer.parallel import init_parallel

    parallel = init_parallel(choose_device("cpu"), 0, TrainerSection())
    yield parallel
    parallel.close()
