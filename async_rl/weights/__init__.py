"""What both ends of a weight transfer share."""
