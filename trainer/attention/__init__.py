"""Shared-prompt attention on the device's kernels, and its reference."""
