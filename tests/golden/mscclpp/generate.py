"""Makes this folder's files anew from a checkout of MSCCL++ (https://github.com/microsoft/mscclpp, MIT), whose version is 0.9.0 at this commit:

    git clone https://github.com/microsoft/mscclpp CHECKOUT && git -C CHECKOUT checkout 1f5f065d
    pip install sortedcontainers
    python tests/golden/mscclpp/generate.py CHECKOUT [--check]

plans/ has what its unit scripts print, and probes/ what it makes of the probe scripts there. With ``--check`` nothing is written,
and a file that differs is an error.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
#: It signals three times and waits twice, which MSCCL++ itself refuses.
REFUSED = "put.put_with_signal_fuse_test"


def printed(script: Path, language: Path, path: Path) -> str:
    """What a script prints with the language of the checkout, whose package cannot be imported without a GPU's libraries."""
    start = (
        "import runpy, sys, types\n"
        "package = types.ModuleType('mscclpp'); package.__path__ = [sys.argv[1]]; sys.modules['mscclpp'] = package\n"
        "script = sys.argv[2]; sys.argv = [script]; runpy.run_path(script, run_name='__main__')\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")]), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", start, str(language), str(script)]
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout


def files(checkout: Path) -> Iterator[tuple[Path, str]]:
    package = checkout / "python" / "mscclpp"
    scripts = package / "language" / "tests" / "unit_tests"
    for script in sorted(scripts.rglob("*.py")):
        name = ".".join(script.relative_to(scripts).with_suffix("").parts)
        if name != REFUSED:
            yield HERE / "plans" / f"unit_tests.{name}.noargs.json", printed(script, package, scripts)
    for probe in sorted((HERE / "probes").glob("[!_]*.py")):
        yield probe.with_suffix(".json"), printed(probe, package, probe.parent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    version = (arguments.checkout / "VERSION").read_text().strip()
    if version != "0.9.0":
        sys.exit(f"the checkout is of version {version}, not 0.9.0")
    made = dict(files(arguments.checkout))
    wrong = [path.name for path, text in made.items() if not path.exists() or path.read_text() != text]
    if arguments.check:
        sys.exit(f"these differ: {', '.join(wrong)}" if wrong else 0)
    for path, text in made.items():
        path.write_text(text)
    print(f"{len(made)} files, of which {len(wrong)} have changed")


if __name__ == "__main__":
    main()
