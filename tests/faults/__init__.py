"""Faults in real processes: nobody is left hanging, and who failed is named."""
