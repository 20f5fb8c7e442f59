"""``python -m benchmarks``: see ``benchmarks.suite``."""

import sys

from benchmarks.suite import main

sys.exit(main())
