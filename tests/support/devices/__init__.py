"""Substitutes for devices that are not available, written from their vendors' documentation."""
