"""The rewards that are built in: each is the file of its name in this folder, or in that of an optional part."""

from async_rl.shared.programs.user_file import PREFIX

PACKAGES = {"math": "math-verify", "reasoning_gym": "reasoning-gym"}
"""What to install for those that need more than Python; the module is called alike, with underscores."""

BUILT_IN = ("math", "multiple_choice", "exact", "f1", "regex", "reasoning_gym", "code", "http", "judge")

IN_PARTS = {"code": "sandbox"}
"""Reward -> the part that has its file."""

EXPECTED = f"{', '.join(BUILT_IN)} or {PREFIX}path/to/file.py:function"
"""For an error."""
