"""What makes an update on-policy: order, proof and selection of groups, and what is computed of them."""
