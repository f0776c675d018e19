"""`python -m router` is the command `crossover`."""

import sys

from router.cli import main

if __name__ == "__main__":
    sys.exit(main())
