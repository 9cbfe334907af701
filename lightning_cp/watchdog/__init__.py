"""Ranks that watch each other, so that a rank that dies or waits for ever is named."""
