"""The embedded engine: transformers' continuous batching with exact sampling and weight updates."""
