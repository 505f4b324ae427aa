"""Trainer against rollout log-probs: their statistics, and which of them noise explains."""
