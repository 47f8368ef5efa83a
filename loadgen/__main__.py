"""`python -m loadgen` is `slackline`."""

import sys

from loadgen.cli import main

sys.exit(main())
