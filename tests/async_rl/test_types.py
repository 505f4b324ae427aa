import pytest

from async_rl.types import UNPROVEN, Batch, Prompt, Response, WeightSpan


@pytest.mark.parametrize(
    ("spans", "versions"),
    [
        (((("v1", 0, 3)),), {"v1"}),
        ((("v1", 0, 1), ("v2", 1, 3)), {"v1", "v2"}),
        ((), {UNPROVEN}),
        ((("v1", 0, 2),), {"v1", UNPROVEN}),
        ((("v1", 1, 3),), {"v1", UNPROVEN}),
        ((("v1", 0, 1), ("v1", 2, 3)), {"v1", UNPROVEN}),
        ((("v1", 0, 4),), {"v1", UNPROVEN}),
    ],
)
def test_a_version_is_proven_only_by_spans_that_cover_every_token(
    spans: tuple[tuple[str, int, int], ...], versions: set[str]
) -> None:
    response = Response(
        token_ids=(5, 6, 7),
        logprobs=(-1.0,) * 3,
        text="",
        finish_reason="stop",
        weight_spans=tuple(WeightSpan(*span) for span in spans),
        instance="a",
    )
    assert response.weight_versions == versions


def test_shares_of_a_batch_are_disjoint_and_complete() -> None:
    batch = Batch(3, {i: Prompt(str(i), (1,), {}) for i in range(7)})
    shares = [batch.share(rank, 3) for rank in range(3)]
    assert [sorted(share.prompts) for share in shares] == [[0, 3, 6], [1, 4], [2, 5]]
    assert all(share.iteration == 3 for share in shares)
