from collections.abc import Iterator

import pytest

from tests.support.programs import Programs


@pytest.fixture
def programs() -> Iterator[Programs]:
    programs = Programs()
    yield programs
    programs.close()
