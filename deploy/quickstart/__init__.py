"""The quickstart: a small model that learns to spell words backward, from the warm start to the report."""
