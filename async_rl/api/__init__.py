"""The interface for scripts and notebooks, `import async_rl`: it runs the commands as processes of their own."""
