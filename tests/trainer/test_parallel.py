"""Where training ranks are reached."""

import pytest

from async_rl.shared.net.local_address import own_loopback
from trainer.parallel import address_for_ranks


@pytest.mark.parametrize("variables", [{}, {"WORLD_SIZE": "2"}, {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}], ids=repr)
def test_ranks_of_one_host_and_one_without_torchrun_are_reached_at_loopback(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert address_for_ranks() == own_loopback()
