"""`python -m looptune` is the command line."""

import sys

from looptune.cli import main

sys.exit(main())
