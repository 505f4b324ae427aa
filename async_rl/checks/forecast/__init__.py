"""What a run will need, from its config and the model's config.json alone: memory, bytes of a publish, tokens."""
