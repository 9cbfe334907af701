"""Lets any Hydra application say ``+strategy=ulysses_ring``.

Hydra imports this file in every application on the machine, so it imports neither torch nor lightning. Only
the folder with that one choice is added, and last: the application's own configs are found first, and
nothing else of ours is found at all.
"""

from __future__ import annotations

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from lightning_cp.utils.run_folder import config_dir


class UlyssesRingSearchPath(SearchPathPlugin):
    """Adds ``configs/search_path`` to the search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Called by Hydra when it collects the places configs come from."""
        search_path.append(provider="lightning_cp", path=f"file://{config_dir() / 'search_path'}")
