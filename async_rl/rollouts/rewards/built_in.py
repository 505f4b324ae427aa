"""What the built-in rewards need."""

from async_rl.config.reward_section import BUILT_IN
from async_rl.shared.programs.user_file import PREFIX

PACKAGES = {"math": "math-verify", "reasoning_gym": "reasoning-gym"}
"""What to install for those that need more than Python; the module is called alike, with underscores."""

IN_PARTS = {"code": "sandbox"}
"""Reward -> the part that has its file."""

EXPECTED = f"{', '.join(BUILT_IN)} or {PREFIX}path/to/file.py:function"
"""For an error."""
