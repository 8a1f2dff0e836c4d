"""`python -m polyattn`."""

import sys

from polyattn.cli import main

sys.exit(main())
