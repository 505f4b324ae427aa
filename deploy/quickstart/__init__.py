"""The quickstart: a small model that learns to spell words backward, from its warm start to a report."""
