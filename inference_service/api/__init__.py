"""The HTTP routes of the embedded engine's server; independent of engine internals."""
