"""Experiment trackers that get a run's figures besides its own files: `tracking.trackers` of the config.

Each has a thread of its own, so that none of them can slow or end the run: `fan_out.py` is what the recorders call,
`tracker_thread.py` the thread, `tracker.py` the interface; a file for each tracker.
"""
