"""`async-rl launch ray`: a run as plain actors in placement groups of a Ray cluster."""
