"""The three models of a rank, and the optimizer of one of them."""
