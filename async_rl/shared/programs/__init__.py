"""Parts that all command-line programs of this repository share."""
