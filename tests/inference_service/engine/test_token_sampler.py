"""The tokens that continuous batching takes are the ones that our sampling chose, and stand on our sequences."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.protocol.inference import SamplingParams
from inference_service.engine.sampling import sample_step
from inference_service.engine.sequences import Sequence
from inference_service.engine.token_sampler import TokenSampler
from inference_service.engine_interface import LogprobsMode

NO_ARGUMENTS = torch.empty(0)


def sequence(seed: int) -> Sequence:
    return Sequence((1, 2), SamplingParams(logprobs=2, temperature=0.7), seed, frozenset())


class Step:
    """A sampler, and what it told."""

    def __init__(self, sequences: dict[str, Sequence], mode: LogprobsMode = "processed_logprobs") -> None:
        self.sampled: list[list[Sequence]] = []
        self.failed: list[list[Sequence]] = []
        self.sampler = TokenSampler(sequences, mode, self.sampled.append, self.failed.append)
        self.sampler.version = "v3"

    def run(self, requests: list[tuple[str, bool]], scores: torch.Tensor) -> list[int]:
        """What the manager's argmax takes, for (request id, whether it gets a token now)."""
        states = [
            SimpleNamespace(state=SimpleNamespace(request_id=name), has_new_token=new_token)
            for name, new_token in requests
        ]
        self.sampler.prepare_tensor_args(states, NO_ARGUMENTS)  # type: ignore[arg-type]
        tokens: list[int] = self.sampler(NO_ARGUMENTS, scores, NO_ARGUMENTS).argmax(-1).tolist()
        return tokens


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(["running", "cancelled", "prefill"]), min_size=1, max_size=6),
    st.sampled_from(["raw_logprobs", "processed_logprobs"]),
    st.integers(0, 2**32),
)
def test_running_requests_get_what_they_would_have_got_alone(kinds: list[str], mode: LogprobsMode, seed: int) -> None:
    names = [f"{i} {kind}" for i, kind in enumerate(kinds)]
    sequences = {name: sequence(i) for i, name in enumerate(names) if "cancelled" not in name}
    rows = [name for name in names if "prefill" not in name]
    scores = torch.randn(len(names), 9, generator=torch.Generator().manual_seed(seed))
    expected = {
        name: sample_step(scores[r : r + 1].clone(), [sequence(names.index(name))], mode, "v3")[0]
        for r, name in enumerate(rows)
        if name in sequences
    }
    step = Step(sequences, mode)
    tokens = step.run([(name, "prefill" not in name) for name in names], scores.clone())
    for r, name in enumerate(rows):
        if name in expected:
            (sample,) = sequences[name].samples
            assert tokens[r] == sample.token_id == expected[name].token_id and sample.version == "v3"
            assert sample.logprob == pytest.approx(expected[name].logprob, abs=1e-6)
            assert (sample.rank, [t[0] for t in sample.top]) == (
                expected[name].rank,
                [t[0] for t in expected[name].top],
            )
    assert all(not s.samples for name, s in sequences.items() if name not in expected)
    assert step.sampler.num_sampled == len(expected) and not step.failed
    assert step.sampled == ([[sequences[name] for name in expected]] if expected else [])


def test_a_row_that_is_not_finite_gets_no_token_and_is_told_as_failed() -> None:
    sequences = {"good": sequence(0), "bad": sequence(1)}
    step = Step(sequences)
    scores = torch.randn(2, 9, generator=torch.Generator().manual_seed(0))
    scores[1, 4] = torch.nan
    step.run([("good", True), ("bad", True)], scores)
    assert step.failed == [[sequences["bad"]]]
    assert len(sequences["good"].samples) == 1 and not sequences["bad"].samples
    assert step.sampler.num_sampled == 1
