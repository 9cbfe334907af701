"""Random numbers under context parallelism."""
