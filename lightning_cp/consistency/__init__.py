"""Checks that ranks agree: on the model, on the settings, on finite gradients."""
