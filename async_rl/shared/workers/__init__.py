"""Processes that run a user's code, rewards and rollout programs: one process with any number of calls.

Their code is the user's own, and may be broken in any way: it may hang, spin, keep the interpreter, exit, crash, fork,
flood its output, or write into what it did not open. None of that harms the trainer or another call. What a model wrote
is hostile and does not belong here, but into `async_rl.parts.sandbox`.
"""
