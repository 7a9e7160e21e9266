"""`python -m river_core`."""

import sys

from river_core.cli import main

sys.exit(main())
