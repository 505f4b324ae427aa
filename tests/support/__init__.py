"""Code shared by several tests; contains no tests."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""Root of the checkout."""
