"""Checks that refuse models and steps which context parallelism cannot compute exactly."""
