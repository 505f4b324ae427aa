"""Jobs of several ranks, references and matrices for the tests of the trainer."""
