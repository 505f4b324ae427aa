"""What `async-rl verify` runs in the training pool: iterations that are recorded, diagnosed and replayed."""
