"""Statistics of trainer against rollout log-probs, and which differences noise explains."""
