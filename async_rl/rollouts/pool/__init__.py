"""Which instances are in service, and which instance gets which group."""
