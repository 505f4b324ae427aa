"""Another program changes the state of the instance of a run, by every control route: the run has the bits of one that
nobody disturbs.

A stranger needs no token here. The instance gives up its work, its weights or its place in a publish, and gets them
again.
"""

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.fresh_seed import fresh_seed
from tests.support.held_phases import ALGORITHM, HOLDS, REWARD
from tests.support.local_run import GUARD, Run, command_of
from tests.support.same_run import assert_same_run
from tests.support.tiers import at_night

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1200)]

UNREADABLE = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[2]], "snapshot": "/nowhere"}
# Its group has no other member: the instance waits for it.
GROUP = {"master_address": "127.0.0.1", "master_port": 9, "secret": "s" * 32, "bucket_bytes": 1024}
CALLS: list[tuple[str, Any]] = [
    *((f"/pause?mode={mode}", None) for mode in ("abort", "wait", "keep")),
    *((f"/sleep?level={level}", None) for level in (0, 1, 2)),
    ("/resume", None),
    *((f"/wake_up{tags}", None) for tags in ("", "?tags=weights", "?tags=kv_cache")),
    ("/init_weight_transfer_engine", {"init_info": GROUP | {"rank_offset": 1, "world_size": 2, "timeout_s": 1}}),
    ("/start_weight_update", {}),
    ("/update_weights", {"update_info": UNREADABLE}),
    *(("/finish_weight_update", {"weight_version": version}) for version in ("theirs", None)),
    ("/collective_rpc", {"method": "base_digest"}),
    ("/abort_requests", {}),
]
PHASES = ("generate", "score", "train", "publish")
DAY = [("shared", "score"), ("turns", "train")]
CASES = [(placement, phase) for placement in ("separate", "shared", "turns") for phase in PHASES]

SETTINGS = (
    *(f"--train.iterations={len(CALLS) + 2}", "--train.order=prompt", "--train.exact=true"),
    *("--publish.transport=snapshot", "--checkpoint.every=0", "--reward.timeout_s=600"),
    "--algorithm.kl_coef=0.05",
)


class DisturbedRun(Run):
    """Its phases can be held."""

    def __init__(self, folder: Path, model: Path) -> None:
        super().__init__(folder, model)
        self.folder = folder
        self.reward.write_text(REWARD + HOLDS)
        (folder / "algorithm.py").write_text(ALGORITHM + HOLDS)

    def words(self, placement: str) -> list[str]:
        named = f"--algorithm.name=python:{self.folder / 'algorithm.py'}:Holding"
        return [*SETTINGS, named, f"--publish.snapshot_dir={self.folder / 'snapshots'}", f"--run.placement={placement}"]

    @property
    def url(self) -> str:
        words = next(words for p in self.instances() if GUARD not in (words := command_of(p)))
        return f"http://127.0.0.1:{words[words.index('--port') + 1]}"

    def in_phase(self, phase: str, call: Callable[[], None]) -> None:
        """Makes the call in the next such phase; what held the phase goes on afterwards."""
        if phase == "generate":
            self.wait_until(lambda: any(member.num_requests for member in self.members()), pause_s=0.0)
        elif phase == "publish":
            time.sleep(random.Random(fresh_seed()).uniform(0.0, 0.2))
        else:
            held = self.folder / f"held-{phase}"
            held.with_name(f"hold-{phase}").touch()
            self.wait_until(held.exists)
        call()
        if phase in ("score", "train"):
            held.unlink()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path]) -> DisturbedRun:
    run = DisturbedRun(tmp_path_factory.mktemp("undisturbed"), tiny_model("qwen3", tied=True))
    run.train(*run.words("separate"))
    return run


@pytest.mark.parametrize(("placement", "phase"), [case if case in DAY else at_night(*case) for case in CASES])
def test_a_run_whose_instance_strangers_control_trains_the_same_bits(
    placement: str, phase: str, undisturbed: DisturbedRun, tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    run = DisturbedRun(tmp_path, tiny_model("qwen3", tied=True))
    run.start(*run.words(placement))
    statuses: dict[str, int] = {}
    try:
        run.wait_for_iterations(1)
        url = run.url
        with httpx.Client(base_url=url, timeout=60) as stranger:
            operations = stranger.get("/openapi.json").json()["paths"]
            controls = {path for path, found in operations.items() if "post" in found and not path.startswith("/v1/")}
            assert controls - {"/inference/v1/generate"} == {path.partition("?")[0] for path, _ in CALLS}
            for number, (path, body) in enumerate(CALLS, start=1):
                run.wait_for_iterations(number)

                def call(path: str = path, body: Any = body) -> None:
                    began_s = time.monotonic()
                    statuses[path] = stranger.post(path, json=body).status_code
                    print(f"{path}: {statuses[path]} after {time.monotonic() - began_s:.1f} s")

                run.in_phase(phase, call)
        assert run.finish() == 0, run.everything_said()
    finally:
        run.end()
    assert_same_run(run, undisturbed)
    if (placement, phase) == ("turns", "train"):
        assert {statuses[path] for path in statuses if path.startswith("/wake_up")} == {409}
    if (placement, phase) == ("shared", "score"):
        assert f"{url} sleeps or is paused" in run.everything_said()
