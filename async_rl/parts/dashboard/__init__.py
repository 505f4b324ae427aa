"""The page on a run's records: live in a browser, as one file, and its samples in a terminal."""
