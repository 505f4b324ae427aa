"""What it takes to run vLLM's own server as an instance."""
