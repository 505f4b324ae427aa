"""What both ends of a connection or several programs need."""
