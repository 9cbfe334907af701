"""Long runs that are not part of the suite: each is a command."""
