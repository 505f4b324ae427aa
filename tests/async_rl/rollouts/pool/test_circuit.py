"""The circuit against a model of it that keeps nothing but the list of what happened."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from async_rl.rollouts.pool.member import FIRST_PAUSE_S, MAX_PAUSE_S, Circuit

STEPS_S = st.sampled_from((0.0, 0.1, FIRST_PAUSE_S, 1.0, MAX_PAUSE_S))


class CircuitMachine(RuleBasedStateMachine):
    """Requests go out whenever the circuit allows it, and end in any order; a few go to it though it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.circuit = Circuit()
        self.now_s = 0.0
        self.under_way: list[float] = []
        self.failures_s: list[float] = []
        """Those that count since it was closed last."""
        self.trial_s: float | None = None

    @rule(step_s=STEPS_S)
    def time_passes(self, step_s: float) -> None:
        self.now_s += step_s

    @rule()
    def a_request_goes_out_if_it_may(self) -> None:
        if not self.circuit.allows(self.now_s):
            return
        self.circuit.sent()
        self.under_way.append(self.now_s)
        if self.failures_s:
            assert self.trial_s is None, "one trial at a time"
            self.trial_s = self.now_s

    @rule(data=st.data())
    def one_makes_tokens(self, data: st.DataObject) -> None:
        if not self.under_way:
            return
        sent_s = data.draw(st.sampled_from(self.under_way))
        self.circuit.succeeded(sent_s)
        if self.failures_s and sent_s >= self.failures_s[-1]:
            self.failures_s, self.trial_s = [], None

    @rule(data=st.data())
    def one_fails(self, data: st.DataObject) -> None:
        if not self.under_way:
            return
        sent_s = self.under_way.pop(data.draw(st.integers(0, len(self.under_way) - 1)))
        self.circuit.failed(self.now_s, sent_s, "503")
        if not self.failures_s or sent_s >= self.failures_s[-1]:
            self.failures_s.append(self.now_s)
            self.trial_s = None

    @rule(data=st.data())
    def one_ends_and_shows_nothing(self, data: st.DataObject) -> None:
        if not self.under_way:
            return
        sent_s = self.under_way.pop(data.draw(st.integers(0, len(self.under_way) - 1)))
        self.circuit.ended(sent_s)
        if self.failures_s and sent_s >= self.failures_s[-1]:
            self.trial_s = None

    @rule()
    def the_trial_is_called_off(self) -> None:
        if self.trial_s is not None:
            self.circuit.reset_trial()
            self.under_way.remove(self.trial_s)
            self.trial_s = None

    @rule()
    def it_is_as_good_as_new(self) -> None:
        self.circuit.reset()
        self.failures_s, self.trial_s = [], None

    @invariant()
    def it_is_as_the_model_says(self) -> None:
        assert self.circuit.is_closed == (not self.failures_s) == (self.circuit.reason is None)
        if not self.failures_s:
            assert self.circuit.allows(self.now_s) and self.circuit.retry_in_s(self.now_s) == 0.0
            return
        pause_s = min(FIRST_PAUSE_S * 2 ** (len(self.failures_s) - 1), MAX_PAUSE_S)
        left_s = max(0.0, self.failures_s[-1] + pause_s - self.now_s)
        assert self.circuit.retry_in_s(self.now_s) == left_s
        assert self.circuit.allows(self.now_s) == (left_s == 0.0 and self.trial_s is None)


TestCircuit = CircuitMachine.TestCase
TestCircuit.settings = settings(max_examples=25, stateful_step_count=20)


def test_one_failure_is_an_incident_however_many_requests_it_ends() -> None:
    circuit = Circuit()
    for _ in range(20):
        circuit.failed(10.0, 9.0, "reset")
    assert circuit.retry_in_s(10.0) == FIRST_PAUSE_S
    circuit.succeeded(9.5)
    assert not circuit.is_closed, "one of before the failure proves nothing"


def test_pauses_double_up_to_a_limit() -> None:
    circuit, now_s, pauses = Circuit(), 0.0, []
    for _ in range(8):
        circuit.failed(now_s, now_s, "503")
        pauses.append(circuit.retry_in_s(now_s))
        now_s += pauses[-1]
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0] and pauses[-1] == MAX_PAUSE_S
