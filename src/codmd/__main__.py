"""`python -m codmd` is the command `codmd`."""

import sys

from codmd.cli import main

sys.exit(main())
