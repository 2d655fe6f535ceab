"""The command ``antiphon``: ``python -m antiphon bench``, ``run``, ``doctor``, ``tune``."""

import sys

from antiphon import _core


def main() -> None:
    sys.exit(_core.main(sys.argv[1:]))


if __name__ == "__main__":
    main()
