"""How long tests wait for what must come: far longer than it takes.

Machines that are slower still, or very busy, multiply that by `WARMROUTE_TEST_TIMEOUT_FACTOR`. No test fails because
something took long, only because it never came.
"""

import os

FACTOR = float(os.environ.get("WARMROUTE_TEST_TIMEOUT_FACTOR") or 1)

#: For what takes milliseconds on an idle machine.
LIMIT_S = 60 * FACTOR
