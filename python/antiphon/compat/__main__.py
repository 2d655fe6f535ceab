"""``python -m antiphon.compat run``: runs a script, or whatever ``python`` can run, on Antiphon."""

import os
import sys
from typing import NoReturn

from antiphon import compat

USAGE = f"""\
usage: python -m antiphon.compat run [--peer NAME]... SCRIPT [ARGUMENT]...
       python -m antiphon.compat run [--peer NAME]... -m MODULE [ARGUMENT]...

Runs a Python program in which Antiphon's modules stand for those of the peers, and in all processes that it starts.
What follows `run` is what would follow `python`, options of the interpreter too.

  --peer NAME  only this one, of {", ".join(compat.PEERS)}
               (default: all but {", ".join(compat.BY_NAME)})"""


def main(arguments: list[str]) -> NoReturn:
    """Becomes the Python process that the arguments describe."""
    if arguments[:1] in (["-h"], ["--help"]) or arguments[:2] in (["run", "-h"], ["run", "--help"]):
        print(USAGE)
        sys.exit(0)
    if arguments[:1] != ["run"]:
        _refuse("the only command is `run`")
    program, peers = arguments[1:], []
    while program and program[0].partition("=")[0] == "--peer":
        option, equals, name = program.pop(0).partition("=")
        if not equals:
            name = program.pop(0) if program else ""
        if name not in compat.PEERS:
            _refuse(f"no peer {name!r} is served")
        peers.append(name)
    if not program:
        _refuse("no program to run")
    compat.tell_children(peers or compat.PEERS.keys() - compat.BY_NAME)
    sys.stdout.flush()
    # A fresh interpreter sets sys.argv, sys.path, __main__ and the exit status.
    os.execv(sys.executable, [sys.executable, *program])


def _refuse(why: str) -> NoReturn:
    print(f"{USAGE}\n\nantiphon.compat: {why}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
