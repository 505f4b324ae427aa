"""`async-rl verify`: shows on a user's own set-up that training beside generation equals training after it."""
