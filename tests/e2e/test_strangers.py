"""Another program changes the state of the instance of a run, by every control route: the run has the bits of one that
nobody disturbs.

A stranger needs no token here. The instance gives up its work, its weights or its place in a publish, and gets them
again.
"""

import random
import re
import time
from collections.abc import Callable
from functools import cache
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
BY_DAY = [CALLS[2], CALLS[5], CALLS[7]]
"""A pause that freezes requests, a sleep that drops the weights, and what wakes it."""
CASES = [
    *((placement, phase, BY_DAY) for placement, phase in (("shared", "score"), ("turns", "train"))),
    *(at_night(placement, phase, CALLS) for placement in ("separate", "shared", "turns") for phase in PHASES),
]

SETTINGS = (
    *("--train.order=prompt", "--train.exact=true"),
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

    def words(self, placement: str, num_calls: int) -> list[str]:
        named = f"--algorithm.name=python:{self.folder / 'algorithm.py'}:Holding"
        own = f"--publish.snapshot_dir={self.folder / 'snapshots'}", f"--run.placement={placement}"
        return [*SETTINGS, named, *own, f"--train.iterations={num_calls + 2}"]

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
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path]
) -> Callable[[int], DisturbedRun]:
    """A run as long as one with so many calls."""

    @cache
    def train(num_calls: int) -> DisturbedRun:
        run = DisturbedRun(tmp_path_factory.mktemp("undisturbed"), tiny_model("qwen3", tied=True))
        run.train(*run.words("separate", num_calls))
        return run

    return train


@pytest.mark.parametrize(("placement", "phase", "calls"), CASES)
def test_a_run_whose_instance_strangers_control_trains_the_same_bits(
    placement: str,
    phase: str,
    calls: list[tuple[str, Any]],
    undisturbed: Callable[[int], DisturbedRun],
    tmp_path: Path,
    tiny_model: Callable[..., Path],
) -> None:
    run = DisturbedRun(tmp_path, tiny_model("qwen3", tied=True))
    run.start(*run.words(placement, len(calls)))
    statuses: dict[str, int] = {}
    try:
        run.wait_for_iterations(1)
        url = run.url
        with httpx.Client(base_url=url, timeout=60) as stranger:
            operations = stranger.get("/openapi.json").json()["paths"]
            controls = {path for path, found in operations.items() if "post" in found and not path.startswith("/v1/")}
            assert controls - {"/inference/v1/generate"} == {path.partition("?")[0] for path, _ in CALLS}
            for number, (path, body) in enumerate(calls, start=1):
                run.wait_for_iterations(number)

                def call(path: str = path, body: Any = body) -> None:
                    began_s = time.monotonic()
                    statuses[path] = stranger.post(path, json=body).status_code
                    print(f"{path}: {statuses[path]} after {time.monotonic() - began_s:.1f} s")

                run.in_phase(phase, call)
        assert run.finish() == 0, run.everything_said()
    finally:
        run.end()
    assert_same_run(run, undisturbed(len(calls)))
    if (placement, phase) == ("turns", "train"):
        assert {statuses[path] for path in statuses if path.startswith("/wake_up")} == {409}
    if (placement, phase) == ("shared", "score"):
        assert f"{url} sleeps or is paused" in run.everything_said()


@pytest.mark.nightly
def test_without_a_snapshot_to_give_it_weights_again_the_trainer_ends_with_its_name_and_begins_again(
    tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    run = DisturbedRun(tmp_path, tiny_model("qwen3", tied=True))
    # So many responses that they are still under way when the call arrives.
    others = ("--publish.transport=broadcast", "--rollout.responses_per_prompt=24")
    run.start(*(word for word in run.words("separate", 8) if not word.startswith("--publish.")), *others)
    try:
        run.wait_for_iterations(1)
        url = run.url
        run.in_phase("generate", lambda: httpx.post(f"{url}/sleep?level=2").raise_for_status())
        run.wait_until(lambda: "trainer is started again" in run.output.read_text())
        run.wait_for_iterations(2)
    finally:
        run.end()
    said = run.everything_said()
    assert re.search(rf"no instance can serve weight version .*\n  {url}: another program has put it to sleep", said)
