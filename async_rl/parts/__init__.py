"""Optional parts: the rest finds them by name, and works without them (`shared/programs/parts.py`)."""
