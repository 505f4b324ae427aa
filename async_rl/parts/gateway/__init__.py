"""The OpenAI-compatible endpoint that lends the policy to agents which cannot be changed; docs/gateway.md."""
