"""What makes finished groups of prompts: data, instances, responses, rewards; and what brings weights there."""
