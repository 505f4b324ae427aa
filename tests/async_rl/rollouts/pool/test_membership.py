"""The state machine of the pool's instances: as its table has it, and never ready without evidence."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from async_rl.rollouts.pool.membership import (
    MAX_FAILED_PUBLISHES,
    MAX_RETURNS,
    STATES,
    TRANSITIONS,
    Event,
    InstanceEntry,
    Membership,
    Transition,
)

URL = "http://10.0.0.1:8000"
BOOTS = (None, "boot-1", "boot-2")

TABLE = """
           joining   ready     draining  stale     dead
received   ready     ready     draining  ready     ready
missed     joining   stale     draining  stale     dead
returned   ready     ready     draining  ready     ready
answered   joining   ready     draining  stale     stale
restarted  joining   joining   draining  joining   joining
failed     stale     stale     draining  stale     stale
unwell     joining   stale     draining  stale     stale
lost       dead      dead      draining  dead      dead
drained    draining  draining  draining  draining  draining
removed    gone      gone      gone      gone      gone
"""
"""Rows are events, columns the states before."""


def test_each_event_leads_from_each_state_to_the_one_of_the_table() -> None:
    header, *rows = TABLE.strip().splitlines()
    expected = {
        (state, event): after
        for event, *afters in map(str.split, rows)
        for state, after in zip(header.split(), afters, strict=True)
    }
    assert expected == {
        (before, event.value): after for (before, event), after in TRANSITIONS.items() if before != "gone"
    }


@pytest.mark.parametrize("name", ["state", "reason", "version", "boot_id", "registered_as", "failed_publishes"])
def test_nobody_can_write_a_standing(name: str) -> None:
    with pytest.raises(AttributeError):
        setattr(InstanceEntry(URL), name, "ready")


def received(boot_id: str | None = "boot-1") -> tuple[Membership, InstanceEntry]:
    """One that received v1."""
    membership, entry = Membership(), InstanceEntry(URL)
    membership.begin_publish()
    membership.end_publish("v1", [entry], {URL: boot_id})
    assert (entry.state, entry.version, entry.boot_id, entry.reason) == ("ready", "v1", boot_id, None)
    return membership, entry


def test_to_remove_an_instance_and_add_it_again_does_not_clear_its_bar() -> None:
    membership, entry = received()
    membership.failed(entry, "it answered with v0")
    membership.removed(entry, "by command")
    again = InstanceEntry(URL)
    assert membership.answered(again, "v1", "boot-1").after == "joining"
    assert membership.is_barred(again) and not membership.may_be_admitted(again)
    membership.begin_publish()
    membership.end_publish("v2", [again], {URL: "boot-1"})
    assert again.state == "ready"


def test_one_that_was_removed_without_a_bar_may_come_back_as_the_same_process() -> None:
    membership, entry = received()
    membership.removed(entry, "the name service")
    again = InstanceEntry(URL)
    assert membership.answered(again, "v1", "boot-1").event is Event.RETURNED and again.state == "ready"


def test_one_that_failed_a_publish_does_not_come_back_though_it_says_that_it_holds_the_version() -> None:
    membership, entry = Membership(), InstanceEntry(URL)
    membership.begin_publish()
    membership.seen(entry, "boot-1")
    membership.publish_failed(entry, "its log-probs are not the trainer's")
    membership.end_publish("v1", [entry], {})
    assert membership.answered(entry, "v1", "boot-1").after == "stale"
    assert not membership.may_be_admitted(entry)


def test_a_process_that_claims_the_version_of_the_one_before_is_not_believed() -> None:
    membership, entry = received()
    assert membership.answered(entry, "v1", "boot-2").event is Event.RESTARTED
    assert entry.state == "joining" and entry.version is None
    assert membership.answered(entry, "v1", "boot-2").after == "joining"
    assert "nobody checked" in (entry.reason or "")
    assert membership.admitted(entry, "v1", "boot-2") is not None and entry.state == "ready"


def test_one_whose_process_is_not_known_does_not_return() -> None:
    membership, entry = received(None)
    membership.lost(entry, "silent")
    assert membership.answered(entry, "v1", None).after == "stale"
    assert "does not tell which process" in (entry.reason or "")


def test_returns_are_counted_by_process_however_often_it_is_added() -> None:
    membership, entry = received()
    for _ in range(MAX_RETURNS):
        membership.lost(entry, "silent")
        assert membership.answered(entry, "v1", "boot-1").after == "ready"
        membership.removed(entry, "by command")
        entry = InstanceEntry(URL)
        assert membership.answered(entry, "v1", "boot-1").after == ("ready" if _ + 1 < MAX_RETURNS else "joining")


def test_one_that_fails_publish_after_publish_is_not_asked_until_it_is_another_process() -> None:
    membership, entry = received()
    for number in range(MAX_FAILED_PUBLISHES):
        assert membership.may_receive(entry), number
        membership.begin_publish()
        membership.publish_failed(entry, "no room")
        membership.end_publish(f"v{number + 2}", [entry], {})
    assert not membership.may_receive(entry)
    membership.seen(entry, "boot-2")
    assert membership.may_receive(entry)


def test_all_attempts_of_one_publish_count_as_one_failure() -> None:
    """A publish that loses everybody on its way tries again with them: torn connections must not use them up."""
    membership, entry = received()
    for _ in range(2 * MAX_FAILED_PUBLISHES):
        membership.begin_publish()
        assert membership.may_receive(entry)
        membership.publish_failed(entry, "the connection broke")
    membership.end_publish("v2", [entry], {})
    assert entry.failed_publishes == 1 and membership.may_receive(entry)


def test_one_that_was_removed_or_just_added_again_may_return_and_a_run_waits_for_it() -> None:
    membership, entry = received()
    membership.lost(entry, "silent")
    assert membership.can_return([entry])
    membership.removed(entry, "the name service")
    again = InstanceEntry(URL)
    assert membership.can_return([]) and membership.can_return([again])
    membership.seen(again, "boot-2")
    assert not membership.can_return([again]), "another process has its address"
    membership.failed(again, "a lie")
    drained = InstanceEntry(URL)
    membership.drained(drained)
    assert not membership.can_return([drained])


class AnyHistory(RuleBasedStateMachine):
    """Two instances, one of them removed and added again and again, through whatever may happen to them.

    What proves that one may serve is kept here independently: the set of (URL, boot id) that received the version in
    training, less those that failed since.
    """

    def __init__(self) -> None:
        super().__init__()
        self.membership = Membership()
        self.entries = {URL: InstanceEntry(URL), "http://10.0.0.2:8000": InstanceEntry("http://10.0.0.2:8000")}
        self.version: str | None = None
        self.num_publishes = 0
        self.evidence: set[tuple[str, str | None]] = set()
        self.bars: set[tuple[str, str | None]] = set()

    def check(self, entry: InstanceEntry, transition: Transition | None, may_become_ready: bool) -> None:
        if transition is None:
            return
        assert transition.after == entry.state
        if transition.before != "ready" and transition.after == "ready":
            assert may_become_ready, f"{transition} without evidence"

    @rule(holders=st.dictionaries(st.integers(0, 1), st.sampled_from(BOOTS)), failing=st.sets(st.integers(0, 1)))
    def publish(self, holders: dict[int, str | None], failing: set[int]) -> None:
        entries = list(self.entries.values())
        self.membership.begin_publish()
        self.version, self.evidence, self.bars = None, set(), set()
        for number in failing:
            self.bars.add((entries[number].url, entries[number].boot_id))
            self.check(entries[number], self.membership.publish_failed(entries[number], "a check"), False)
        passed = {entries[i].url: boot for i, boot in holders.items() if i not in failing}
        self.num_publishes += 1
        self.version = f"v{self.num_publishes}"
        transitions = self.membership.end_publish(self.version, entries, passed)
        for entry, transition in zip(entries, transitions, strict=True):
            self.check(entry, transition, entry.url in passed)
        self.evidence = set(passed.items())
        self.bars -= {(url, either) for url, boot in passed.items() for either in (boot, None)}

    @rule(which=st.integers(0, 1), boot=st.sampled_from(BOOTS), is_current=st.booleans())
    def answer(self, which: int, boot: str | None, is_current: bool) -> None:
        entry = list(self.entries.values())[which]
        version = self.version if is_current and self.version else "default"
        is_proven = boot is not None and (entry.url, boot) in self.evidence and version == self.version
        self.check(entry, self.membership.answered(entry, version, boot), is_proven)

    @rule(which=st.integers(0, 1), boot=st.sampled_from(BOOTS))
    def health(self, which: int, boot: str | None) -> None:
        entry = list(self.entries.values())[which]
        self.check(entry, self.membership.seen(entry, boot), False)

    @rule(which=st.integers(0, 1), boot=st.sampled_from(BOOTS), is_current=st.booleans())
    def admit(self, which: int, boot: str | None, is_current: bool) -> None:
        entry = list(self.entries.values())[which]
        if self.membership.may_be_admitted(entry):
            version = self.version if is_current and self.version else "v-before"
            transition = self.membership.admitted(entry, version, boot)
            self.check(entry, transition, version == self.version)
            if transition is not None:
                self.evidence.add((entry.url, boot))
                self.bars -= {(entry.url, boot), (entry.url, None)}

    @rule(which=st.integers(0, 1))
    def fail(self, which: int) -> None:
        entry = list(self.entries.values())[which]
        self.evidence.discard((entry.url, entry.boot_id))
        self.bars.add((entry.url, entry.boot_id))
        self.check(entry, self.membership.failed(entry, "it answered with v0"), False)

    @rule(which=st.integers(0, 1), kind=st.sampled_from(["lost", "unwell", "useless"]))
    def suffer(self, which: int, kind: str) -> None:
        entry = list(self.entries.values())[which]
        self.check(entry, getattr(self.membership, kind)(entry, "why"), False)

    @rule(which=st.integers(0, 1), drain=st.booleans())
    def remove_and_add(self, which: int, drain: bool) -> None:
        entry = list(self.entries.values())[which]
        if drain:
            self.membership.drained(entry)
        self.check(entry, self.membership.removed(entry, "by command"), False)
        assert entry.state == "gone"
        self.entries[entry.url] = InstanceEntry(entry.url)

    @invariant()
    def whoever_is_ready_has_evidence(self) -> None:
        for entry in self.entries.values():
            assert entry.state in STATES
            if entry.state == "ready" and self.version is not None and entry.version == self.version:
                assert (entry.url, entry.boot_id) in self.evidence


AnyHistory.TestCase.settings = settings(max_examples=150, stateful_step_count=30)
test_no_history_makes_an_instance_ready_without_evidence = AnyHistory.TestCase
