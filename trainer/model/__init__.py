"""A Hugging Face architecture as Megatron's GPTModel."""
