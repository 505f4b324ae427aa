"""An inference instance: an engine behind vLLM's RL protocol over HTTP."""
