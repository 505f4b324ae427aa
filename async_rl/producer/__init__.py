"""The producer: the program that rolls out the batches of a run, beside its training ranks.

It owns prompts, pool and membership, rewards, rollout programs, the gateway, the fleet endpoint, evaluation, the
records, and the control side of publishing. The ranks know batches as groups that arrive (`client.py`).
"""
