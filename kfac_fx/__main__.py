"""`python -m kfac_fx`."""

import sys

from kfac_fx.cli.command import main

if __name__ == "__main__":
    sys.exit(main())
