"""Dynamic sampling: which groups of a batch with a reserve are trained."""
