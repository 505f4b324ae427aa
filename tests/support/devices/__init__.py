"""Substitutes for devices that are not available, following their vendors' documentation."""
