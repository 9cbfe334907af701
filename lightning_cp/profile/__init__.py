"""The profile view: one step of every rank recorded, summarised in a table and drawn."""
