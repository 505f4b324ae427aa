"""Tests elsewhere that need an optional part; most of such tests are in the folder of the part."""

import pytest

from async_rl.shared.programs.parts import has_part


def needs_part(part: str) -> pytest.MarkDecorator:
    """Leaves a test out where the part's folder is removed."""
    return pytest.mark.skipif(not has_part(part), reason=f"the optional part {part!r} is missing")
