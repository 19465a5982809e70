"""``python -m chatflow`` is the command ``chatflow``."""

from chatflow.cli import main

main()
