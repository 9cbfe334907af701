"""Other implementations of context parallelism, as methods that compute the same cases."""
