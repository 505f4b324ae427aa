"""Hostile programs neither harm nor outlive whoever runs them, nor reach a secret: as root and as a plain user, with
each backend."""

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

from async_rl.sandbox.backend import PREFIX, PYTHON
from async_rl.sandbox.bubblewrap import find_bubblewraps
from async_rl.sandbox.sandlock import has_sandlock
from tests.support import ROOT
from tests.support.hostile_programs import BREAKING, IN_MEMORY, REACHING
from tests.support.sandbox_worker import LIMITS

pytestmark = pytest.mark.distributed

ENDED_S = LIMITS.wall_s + 15.0
"""A program's own time, and its start and end on a machine whose cores others use."""

NOBODY = 65534

AS = ["root", "nobody"] if os.geteuid() == 0 else ["this user"]
"""Root may become somebody else; a plain user is one."""

IN_A_PLACE_OF_ITS_OWN = f"""
mount --bind {PREFIX} "$PLACE/python" &&
exec "$@"
"""
"""A Python that every user may enter: root's own may be below root's home."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment of a Python at `place/python`, with the packages of this one."""
    made = tmp_path_factory.mktemp("place", numbered=True)
    for folder in (made, *made.parents):
        if folder.is_relative_to(tmp_path_factory.getbasetemp().parent.parent):
            folder.chmod(folder.stat().st_mode | 0o055)
    return made
