"""Where files outside the package are kept. Floor 0."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "FUSIONREG_CACHE_DIR"


def cache_directory() -> Path:
    """``FUSIONREG_CACHE_DIR``, else the user's cache folder. :class:`OSError` where there is no home."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        try:  # service files and container images set it without a shell: nobody has read the ~ yet
            return Path(chosen).expanduser()
        except RuntimeError as e:
            raise OSError(f"no cache folder: {e}") from None
    import platformdirs

    try:
        return Path(platformdirs.user_cache_dir("fusionreg", appauthor=False))
    except (RuntimeError, KeyError) as e:  # no home directory at all
        raise OSError(f"no cache folder: {e}") from None
