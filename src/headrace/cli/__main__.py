"""``python -m headrace.cli``: the same as the command ``headrace``."""

import sys

from . import main

if __name__ == "__main__":
    sys.exit(main())
