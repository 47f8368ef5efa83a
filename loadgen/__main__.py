"""Runs the `slackline` command line, as `python -m loadgen`."""

import sys

from loadgen.cli.main import main

sys.exit(main())
