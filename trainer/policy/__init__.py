"""The three models of a rank, and the policy's optimizer."""
