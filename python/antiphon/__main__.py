"""The command ``antiphon``: ``python -m antiphon bench``, ``run``, ``doctor``, ``tune``, ``plan``, ``lower``, ``completions``."""

import os
import signal
import sys

from antiphon import _core


def main() -> None:
    # No Python code runs meanwhile, so Python's signal handler would never run.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # `run` and `plan build` run scripts, by a Python that has this package.
    os.environ.setdefault("ANTIPHON_PYTHON", sys.executable)
    sys.exit(_core.main(sys.argv[1:]))


if __name__ == "__main__":
    main()
