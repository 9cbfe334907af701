"""What is watched while a run goes on: values that are not finite, signals, other ranks."""
