"""Hugging Face checkpoints (safetensors) into models of any sharding, and back.

Nothing here uses Lightning. ``files`` lists the tensors of a directory and refuses bad files; ``keys`` and
``matching`` assign them to parameters, ``plan`` to this rank's parts; ``reader`` reads, ``load`` does all of
it, ``export`` writes.
"""
