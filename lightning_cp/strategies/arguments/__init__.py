"""Settings that a user asks of a strategy, and checks of them."""
