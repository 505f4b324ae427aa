"""Processes that begin with everything imported: forked from a warm interpreter instead of started anew.

A run has four programs, of which two import torch, transformers and Megatron for six to nine processor seconds, and the
tests start hundreds of them. Here one interpreter per test process imports all that once, and then waits
(`interpreter.py`); what tests start with `python -m MODULE`, and what that starts in turn, is forked from it.

What a caller of `subprocess` sees is what it would see of a new interpreter: a child of its own with its own id,
arguments (also in /proc), environment, working directory, descriptors, session, signals, limits and cores
(`start.py`). Nothing is computed, and no thread started, before the fork. What differs: the seed of hashes is that of
the warm interpreter, and the memory that the libraries occupy is shared. Where either or the start itself is the
subject, a test is marked `cold`; other modules, other options of Python, and environment variables that libraries read
when they are imported lead to an ordinary start, too.

Linux on x86-64 and Python 3.11 only; elsewhere, and where the interpreter cannot be had, every start is ordinary.
ASYNC_RL_TESTS_COLD=1 makes it so everywhere.
"""
