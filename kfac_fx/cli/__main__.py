"""`python -m kfac_fx.cli`."""

import sys

from kfac_fx.cli.command import main

sys.exit(main())
