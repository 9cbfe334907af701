"""What a user asks of a strategy, and whether it can be had."""
