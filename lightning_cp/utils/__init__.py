"""Helpers that do not depend on context parallelism."""
