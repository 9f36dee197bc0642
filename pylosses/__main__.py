"""``python -m pylosses`` is the command ``pylosses``."""

import sys

from .cli import main

sys.exit(main())
