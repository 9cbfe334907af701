"""Hugging Face checkpoints (safetensors) into models of any sharding, and back.

Nothing here knows of Lightning. ``header`` and ``index`` say what a directory holds and refuse bad files;
``keys`` and ``local`` say which part of which tensor goes where (``plan``); ``reader`` reads it, ``load``
does all of it together, ``export`` writes.
"""
