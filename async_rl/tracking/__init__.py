"""What a run writes about itself, and where."""
