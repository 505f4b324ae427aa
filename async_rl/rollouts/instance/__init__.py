"""One inference instance over HTTP."""
