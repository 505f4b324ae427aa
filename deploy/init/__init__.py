"""`async-rl init`: writes the config of a first run from what model, data and machine show."""
