"""`async-rl quickstart smollm2`: a real model with its tokenizer and chat template, on a laptop's CPU."""
