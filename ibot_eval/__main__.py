"""``python -m ibot_eval``, which torchrun needs."""

import sys

from ibot_eval.cli import main

if __name__ == "__main__":
    sys.exit(main())
