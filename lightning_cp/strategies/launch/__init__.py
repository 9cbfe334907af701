"""The launcher of the processes, and what they are told of their ranks."""
