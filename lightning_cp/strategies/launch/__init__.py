"""Who starts the processes, and what they are told of their ranks."""
