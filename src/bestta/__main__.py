"""``python -m bestta`` is the ``bestta`` command."""

from bestta.cli import main

if __name__ == "__main__":
    main()
