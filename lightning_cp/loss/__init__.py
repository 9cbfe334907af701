"""Weight of a rank's loss: counted targets, accumulation over steps, and logged averages."""
