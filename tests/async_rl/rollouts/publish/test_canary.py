"""When a publish lets the canary go first, to whom, and what becomes of instances that fail it."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from async_rl.config.pool_section import PublishSection
from async_rl.config.rollout_section import RolloutSection
from async_rl.errors import InstanceError, PublishError
from async_rl.method.proof.gap_limits import noise_scale
from async_rl.rollouts.publish.admission import Admission, Offer
from async_rl.rollouts.publish.canary import Canary
from async_rl.rollouts.publish.instance_update import announcement
from async_rl.shared.event_loop import EventLoopThread
from async_rl.shared.weights.sender import WeightSender, WeightSource
from tests.support.publishing import PROMPT, SPECS, Publishing, stream, sums
from tests.support.scripted_instance import sample

STALE_SHIFT = {"head": -0.3, "q": -0.6}
"""What leaving a class as it was adds to the log-probs of the scripted instances' tokens."""


class ScriptedTrainer:
    """Scores what the scripted instances sample, for any seed of theirs."""

    def __init__(self) -> None:
        self.strengths: Mapping[str, int] = {}
        self.num_changes = 0

    def change(self, strengths: Mapping[str, int]) -> None:
        self.strengths = dict(strengths)
        self.num_changes += 1

    def score(self, prompt: Sequence[int], responses: Sequence[Sequence[int]]) -> list[list[float]]:
        shift = sum(STALE_SHIFT[name] for name in STALE_SHIFT if name not in self.strengths)
        known = {tuple(tokens): logprobs for tokens, logprobs in (sample(s, len(prompt), 24) for s in range(64))}
        return [[lp + shift for lp in known.get(tuple(r), [-1.0] * len(r))] for r in responses]

    @property
    def source(self) -> WeightSource:
        """Its stream is as the true weights, or twice as large."""
        return WeightSource(
            SPECS, lambda: stream(2.0 if self.strengths else 1.0), self.score, self.change, tuple(STALE_SHIFT)
        )


def sender_of(source: WeightSource) -> WeightSender:
    return WeightSender(source, PublishSection(), "run")


@pytest.fixture
def publishing(loop: EventLoopThread) -> Iterator[Publishing]:
    publishing = Publishing(loop)
    yield publishing
    publishing.close()


def make_canary(mode: str = "first", exact: bool = False) -> Canary:
    rollout = RolloutSection(max_response_tokens=24)
    return Canary(PublishSection(canary=mode), rollout, PROMPT, noise_scale("float32"), "float32", exact=exact)


@pytest.mark.distributed
@pytest.mark.parametrize("how", ["broadcast", "snapshot"])
def test_a_canary_goes_first_and_only_those_that_follow_it_get_the_true_weights(
    start_receivers_once: Callable[..., list[Any]], publishing: Publishing, tmp_path: Any, how: str
) -> None:
    sound, broken = start_receivers_once({}, {"shift": STALE_SHIFT["head"], "server": "0.33.0"})
    options = {"snapshot_dir": tmp_path, "transport": "snapshot"} if how == "snapshot" else {}
    trainer = ScriptedTrainer()
    publisher, pool = publishing.make(
        sound, broken, canary=make_canary(), source=trainer.source, probes=False, **options
    )

    def publish(version: str) -> tuple[str, ...]:
        return publisher.publish(version).instances

    assert publish("run-0") == (sound.url,)
    assert "computes with a stale copy of head" in str(pool.members[1].reason)
    assert sound.sums() == sums(1.0) and broken.sums() == sums(2.0), "it never got to the true weights"
    assert trainer.strengths == {}
    calls = sound.seen()["calls"]
    assert calls.count("/update_weights") == 2
    # Its kind has passed, so the next publish brings one stream to it; the other is tried again.
    assert publish("run-1") == (sound.url,)
    assert sound.seen()["calls"].count("/update_weights") == 3
    broken.rescript(shift=0.0)
    assert publish("run-2") == (sound.url, broken.url)
    before = trainer.num_changes
    assert publish("run-3") == (sound.url, broken.url)
    assert trainer.num_changes == before, "all kinds have passed"


@pytest.mark.distributed
def test_a_pool_that_fails_the_canary_as_a_whole_ends_the_publish_with_the_class(
    start_receivers_once: Callable[..., list[Any]], publishing: Publishing
) -> None:
    (broken,) = start_receivers_once({"shift": STALE_SHIFT["q"]})
    trainer = ScriptedTrainer()
    publisher, _ = publishing.make(broken, canary=make_canary("always"), source=trainer.source, probes=False)
    with pytest.raises(PublishError, match="computes with a stale copy of q"):
        publisher.publish("run-0")
    assert trainer.strengths == {}


@pytest.mark.distributed
def test_one_that_no_stale_copy_explains_is_asked_again_alone_with_constant_classes(
    start_receivers_once: Callable[..., list[Any]], publishing: Publishing
) -> None:
    sound, broken = start_receivers_once({}, {"shift": -5.0, "server": "0.33.0"})
    trainer = ScriptedTrainer()
    publisher, pool = publishing.make(sound, broken, canary=make_canary(), source=trainer.source, probes=False)
    assert publisher.publish("run-0").instances == (sound.url,)
    assert "equal values of no other class than q mend that" in str(pool.members[1].reason)
    # The canary and one search; the canary and the true weights.
    assert [each.seen()["calls"].count("/update_weights") for each in (broken, sound)] == [2, 2]
    assert trainer.strengths == {}


@pytest.mark.distributed
def test_in_exact_mode_an_instance_with_any_difference_fails_the_canary(
    start_receivers_once: Callable[..., list[Any]], publishing: Publishing
) -> None:
    (rounds_otherwise,) = start_receivers_once({"shift": 1e-7})
    source = ScriptedTrainer().source
    publisher, _ = publishing.make(rounds_otherwise, canary=make_canary(exact=True), source=source, probes=False)
    with pytest.raises(
        PublishError, match=r"1\.\d\de-07 nats per token .* train.exact allows no difference: start it with"
    ):
        publisher.publish("run-0")
    rounds_otherwise.rescript(shift=0.0)
    publisher, _ = publishing.make(rounds_otherwise, canary=make_canary(exact=True), source=source, probes=False)
    assert publisher.publish("run-1").instances


def scripted_member(url: str, boot_id: str) -> Any:
    """A member of the pool whose instance reports the same kind of engine as any other."""

    async def options(timeout_s: float) -> str:
        return "1 worker"

    dialect = SimpleNamespace(name="embedded", holds_what_it_received=True)
    client = SimpleNamespace(dialect=dialect, server="0.32.0", engine_options=options, url=url)
    return type("Scripted", (), {"url": url, "boot_id": boot_id, "state": "joining", "client": client})()


@pytest.mark.parametrize(("exact", "is_due"), [(False, False), (True, True)])
def test_in_exact_mode_every_process_has_to_pass_the_canary_itself(exact: bool, is_due: bool) -> None:
    first, peer = scripted_member("http://first", "a"), scripted_member("http://peer", "b")
    restarted = scripted_member("http://first", "c")
    canary, trainer = make_canary(exact=exact), sender_of(ScriptedTrainer().source)
    assert asyncio.run(canary.due(first))
    tokens, logprobs = sample(0, len(PROMPT), 24)
    with canary.changed(trainer):
        assert not canary.judge({first: [(tuple(tokens), tuple(logprobs))]}, trainer, lambda members: {})
    assert not asyncio.run(canary.due(first))
    # Nothing that they report says whether they were started with --exact, or which processor they have.
    assert asyncio.run(canary.due(peer)) == is_due
    assert asyncio.run(canary.due(restarted)) == is_due


def test_a_late_joiner_of_a_kind_that_has_not_passed_waits_for_the_next_publish() -> None:
    member = scripted_member("http://late", "a")
    admission = Admission(PublishSection())
    admission.canary = make_canary()
    admission.offer = Offer("run-0", announcement(sender_of(ScriptedTrainer().source).facts(), "whole"), "f", "f")
    with pytest.raises(InstanceError, match=r"joins with the next publish: .* \(publish\.canary\)"):
        asyncio.run(admission.admit(member))
