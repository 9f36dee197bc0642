"""``python -m pylosses`` is the command ``pylosses``."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
