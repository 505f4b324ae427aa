"""Jobs of several ranks, reference implementations and matrices for the tests of the trainer."""
