"""HTTP and addresses, for servers and clients."""
