"""Garbage collections pause while libraries are imported, and only then."""

import gc
from collections.abc import Iterator

import pytest

from async_rl.shared.programs.loading import loading


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_nothing_is_collected_amid_imports_and_what_they_leave_is_left_alone() -> None:
    with loading():
        assert not gc.isenabled()
    assert gc.isenabled() and gc.get_freeze_count() > 0


def test_collections_go_on_after_an_import_that_fails() -> None:
    with pytest.raises(ImportError), loading():
        raise ImportError
    assert gc.isenabled()
