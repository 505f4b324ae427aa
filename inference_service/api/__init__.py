"""The HTTP routes of the embedded engine's server; they know no engine internals."""
