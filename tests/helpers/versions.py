"""What older versions of PyTorch, which are allowed, do otherwise."""

from __future__ import annotations

import torch

FAKE_RECEIVES = torch.__version__ >= "2.13"
"""A rank of the ``fake`` backend receives what it sends to itself; before, results stay empty."""

BROADCASTS_WRITE = torch.__version__ < "2.12"
"""DDP's broadcast of buffers counts as a write to them also where it changes nothing."""
