"""Hugging Face models: their attention, positions, masks and labels in a step."""
