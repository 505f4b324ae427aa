"""Who is in service, and who gets which group."""
