"""Runs untrusted programs isolated: code that a model wrote, for rewards and for tools of agents.

`open_sandbox` finds what isolates on this machine, and refuses where nothing does. See docs/sandbox.md.
"""

from async_rl.parts.sandbox.limits import Limits, Outcome, Program, Status
from async_rl.parts.sandbox.probe import open_sandbox
from async_rl.parts.sandbox.sandbox import Sandbox
from async_rl.parts.sandbox.tool import PythonTool, open_python_tool

__all__ = ["Limits", "Outcome", "Program", "PythonTool", "Sandbox", "Status", "open_python_tool", "open_sandbox"]
