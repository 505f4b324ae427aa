"""The parts that both sides of a weight transfer share."""
