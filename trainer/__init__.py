"""The training pool: Megatron-core under torchrun, driven by `async_rl.loop`."""
