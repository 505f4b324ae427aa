"""What all command-line programs of the house share."""
