"""`async-rl audit`: whether a running engine serves a checkpoint, by its answers over HTTP; for any trainer's users."""
