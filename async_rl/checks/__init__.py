"""What is checked and forecast before a run, from files alone."""
