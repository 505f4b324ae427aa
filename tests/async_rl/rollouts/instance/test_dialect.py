"""Which dialect a server speaks, by what it says of itself."""

import pytest

from async_rl.rollouts.instance.dialect import EMBEDDED, VLLM, VLLM_WITHOUT_VERSIONS, Dialect, dialect_of
from async_rl.shared.protocol import routes

RELEASES: list[tuple[str, Dialect]] = [
    *((version, VLLM_WITHOUT_VERSIONS) for version in ("0.23.0", "0.4", "0.31.9", "0.31.0rc1", "0.9.2.dev3+gabc")),
    *((version, VLLM) for version in ("0.32.0", "0.32", "0.100.1", "1.0.0", "10.2", "0.32.0rc1")),
    *((version, VLLM) for version in ("", "dev", "main-abc", "v0.23", "0", "0.x")),
]


@pytest.mark.parametrize(("version", "dialect"), RELEASES)
@pytest.mark.parametrize("owner", [None, "vllm", "somebody"])
def test_a_release_of_vllm_is_told_by_its_number_and_an_unknown_one_counts_as_new(
    version: str, dialect: Dialect, owner: str | None
) -> None:
    assert dialect_of(version, owner) is dialect


@pytest.mark.parametrize("version", [version for version, _ in RELEASES])
def test_the_embedded_engine_is_known_by_its_owner_whatever_release_it_speaks_like(version: str) -> None:
    assert dialect_of(version, routes.OWNED_BY_EMBEDDED) is EMBEDDED
