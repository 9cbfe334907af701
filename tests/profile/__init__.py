"""The profile view: reading traces, figures, files, settings."""
