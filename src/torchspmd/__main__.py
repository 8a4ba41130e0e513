"""``python -m torchspmd``, for launchers that want a module."""

import sys

from torchspmd._cli import main

sys.exit(main())
