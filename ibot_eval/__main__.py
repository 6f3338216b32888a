"""``python -m ibot_eval``, which torchrun needs."""

import sys

from ibot_eval.cli import main
from ibot_eval.orphans import end_with_launcher

if __name__ == "__main__":
    end_with_launcher()
    sys.exit(main())
