"""The main job: ``python -m lightning_cp.train`` trains a language model on bytes of real text."""
