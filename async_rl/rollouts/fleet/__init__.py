"""The inference pool from the trainer's side: members, routing, health, and the endpoint that changes it."""
