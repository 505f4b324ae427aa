"""Each process of a run is stopped (SIGSTOP) in each phase: the run ends in time, with the bits of one without a fault.

The reward and the algorithm hold a phase for as long as the test needs; the other phases are looked for.
"""

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.local_run import EVALUATION, GUARD, Run, command_of
from tests.support.same_run import assert_same_run

pytestmark = [pytest.mark.distributed, pytest.mark.nightly, pytest.mark.timeout(1200)]

LOST_AFTER_S = 5
SETTINGS = (
    *("--train.iterations=6", "--train.order=prompt", "--train.exact=true", "--checkpoint.every=1"),
    *("--algorithm.kl_coef=0.05", "--reward.timeout_s=600"),
    *(f"--trainer.lost_after_s={LOST_AFTER_S}", "--publish.transport=snapshot"),
)

HOLDS = '''
def hold(phase):
    """Waits in this phase, once, if the file `hold-PHASE` beside this one says so, until `held-PHASE` is gone."""
    import pathlib
    import time

    asked, held = (pathlib.Path(__file__).with_name(f"{word}-{phase}") for word in ("hold", "held"))
    try:
        asked.rename(held)
    except FileNotFoundError:
        return
    while held.exists():
        time.sleep(0.02)
'''

REWARD = """
def vowels(prompt, responses, row):
    hold("evaluate" if "held_out" in row else "score")
    return [sum(c in "aeiou" for c in r.text) / max(len(r.text), 1) for r in responses]


vowels.correct_at = 0.5
"""

ALGORITHM = """
from async_rl.method.algorithms import PolicyGradient


class Holding(PolicyGradient):
    def _advantages(self, rewards_G):
        hold("train")
        return super()._advantages(rewards_G)
"""


class StoppedRun(Run):
    """A run whose phases can be held; `placement` is that of the config."""

    def __init__(self, folder: Path, model: Path, placement: str) -> None:
        super().__init__(folder, model)
        self.folder, self._placement = folder, placement
        self.reward.write_text(REWARD + HOLDS)
        (folder / "algorithm.py").write_text(ALGORITHM + HOLDS)
        rows = (folder / "rows.jsonl").read_text().replace("}", ', "held_out": true}')
        (folder / "held_out.jsonl").write_text(rows)
        self.config.write_text(self.config.read_text() + EVALUATION.format(source=folder / "held_out.jsonl"))

    def begin(self) -> None:
        named = f"--algorithm.name=python:{self.folder / 'algorithm.py'}:Holding"
        snapshots = f"--publish.snapshot_dir={self.folder / 'snapshots'}"
        self.start(*SETTINGS, named, snapshots, f"--run.placement={self._placement}")

    def role(self, name: str) -> psutil.Process | None:
        """Its process; None while it is not there."""
        if name == "instance":
            found = [p for p in self.instances() if GUARD not in command_of(p)]
        else:
            found = self.ranks() if name == "rank" else [p for p in self.descendants() if is_producer(p)]
        return found[0] if found else None

    def stop(self, name: str) -> psutil.Process:
        self.wait_until(lambda: self.role(name), pause_s=0.0)
        process = self.role(name)
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        return process


def is_producer(process: psutil.Process) -> bool:
    return "async_rl.producer" in command_of(process)


def answers(run: StoppedRun, route: str, key: str) -> bool:
    """What the instance says of itself."""
    words = command_of(run.instances()[0])
    url = f"http://127.0.0.1:{words[words.index('--port') + 1]}"
    return bool(httpx.get(f"{url}{route}").json()[key])


def look_for(run: StoppedRun, condition: Callable[[], bool]) -> None:
    run.wait_for_iterations(2)
    run.wait_until(condition, pause_s=0.0)


LOOKED_FOR: dict[str, Callable[[StoppedRun], bool]] = {
    "generate": lambda run: any(member.num_requests for member in run.members()),
    "publish": lambda run: answers(run, "/is_paused", "is_paused"),
    "checkpoint": lambda run: any((run.dir / "checkpoints").glob("*.partial")),
    "sleep": lambda run: answers(run, "/is_sleeping", "is_sleeping"),
    "wake": lambda run: not answers(run, "/is_sleeping", "is_sleeping"),
}
HELD = ("score", "train", "evaluate")
ROLES = ("rank", "producer", "instance")
CASES = [
    *(("separate", role, phase) for role in ROLES for phase in ("start", "generate", *HELD, "publish", "checkpoint")),
    *(("turns", role, phase) for role in ROLES for phase in ("score", "train", "sleep", "wake")),
]


def stop_in_phase(run: StoppedRun, role: str, phase: str) -> psutil.Process:
    """Returns when it is stopped; what held the phase goes on."""
    if phase == "start":
        return run.stop(role)
    if phase in HELD:
        run.wait_for_iterations(2)
        held = run.folder / f"held-{phase}"
        held.with_name(f"hold-{phase}").touch()
        run.wait_until(held.exists)
        stopped = run.stop(role)
        held.unlink()
        return stopped
    if phase == "wake":
        look_for(run, lambda: LOOKED_FOR["sleep"](run))
    look_for(run, lambda: LOOKED_FOR[phase](run))
    return run.stop(role)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path]) -> Iterator[StoppedRun]:
    run = StoppedRun(tmp_path_factory.mktemp("undisturbed"), tiny_model("qwen3", tied=True), "separate")
    run.begin()
    assert run.finish() == 0, run.everything_said()
    yield run


@pytest.mark.parametrize(("placement", "role", "phase"), CASES, ids=["-".join(case) for case in CASES])
def test_a_stopped_process_is_replaced_and_the_run_trains_the_same_bits(
    placement: str, role: str, phase: str, undisturbed: StoppedRun, tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    run = StoppedRun(tmp_path, tiny_model("qwen3", tied=True), placement)
    run.begin()
    try:
        stopped = stop_in_phase(run, role, phase)
        began_s = time.monotonic()
        code = run.finish(600)
        print(f"{placement}, {role} stopped in {phase}: ended {time.monotonic() - began_s:.0f} s later")
        assert not stopped.is_running() or stopped.status() == psutil.STATUS_ZOMBIE
        if (role, phase) == ("instance", "start"):
            # As any instance that cannot start: nothing is trained yet.
            assert code == 1 and "ProcessFailed: instance-0 " in (said := run.everything_said()), said
            assert "was stopped by a signal for more than 35 s" in said
            return
        assert code == 0, run.everything_said()
        # Those of a producer that is lost before it has written them are not made again: docs/independent_pools.md.
        num_unsampled = len(run.lines("metrics.jsonl")) - len({row["iteration"] for row in run.lines("samples.jsonl")})
        assert num_unsampled <= (role == "producer")
        assert_same_run(run, undisturbed, num_unsampled)
    finally:
        run.end()
