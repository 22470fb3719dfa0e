"""``python -m trak_lite``: the command line."""

from __future__ import annotations

import sys

from trak_lite.cli import main

if __name__ == "__main__":
    sys.exit(main())
