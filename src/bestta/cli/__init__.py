"""The ``bestta`` command."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; what it needs beyond the library is the ``cli`` extra."""
    try:
        from bestta.cli.app import run
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("bestta"):
            raise
        sys.exit(
            f"The bestta command needs {error.name}, which is not installed.\n"
            "Install it with: pip install 'bestta[cli]'"
        )
    except ImportError as error:
        if error.name is not None:
            raise  # not one of ours, which say what to install
        sys.exit(str(error))
    run()
