"""What docs/guide/language.md shows, and the examples that it walks through."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "guide" / "language.md").read_text()
EXAMPLES = sorted((ROOT / "examples" / "python" / "plans").glob("*.py"))


def built(example: Path, size: int, into: Path) -> dict:
    command = [sys.executable, "-m", "antiphon", "plan", "build", str(example), "-o", str(into), "--", str(size)]
    subprocess.run(command, check=True)
    return json.loads(into.read_text())


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_page_shows_the_example(example: Path) -> None:
    [body] = re.findall(r"(def .*?return JSON\(\)\n)", example.read_text(), re.DOTALL)
    assert body in PAGE and f"../../examples/python/plans/{example.name}" in PAGE


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_every_rank_does_what_the_page_says(example: Path, tmp_path: Path) -> None:
    [said] = re.findall(rf"{example.name}\):\n.*?\n```\n([\w ]+)\n```", PAGE, re.DOTALL)
    plan = built(example, 4, tmp_path / "plan.json")
    for gpu in plan["gpus"]:
        for block in gpu["threadblocks"]:
            assert " ".join(op["name"] for op in block["ops"]) == said


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_for_any_number_of_ranks(example: Path, size: int, tmp_path: Path) -> None:
    assert len(built(example, size, tmp_path / "plan.json")["gpus"]) == size


def test_the_tour(tmp_path: Path) -> None:
    [tour] = re.findall(r"## The tour\n.*?```sh\n(.*?)```", PAGE, re.DOTALL)
    for line in tour.splitlines():
        words = line.split("#")[0].replace("two_shot.json", str(tmp_path / "two_shot.json")).split()
        words = [word.replace("two_shot.html", str(tmp_path / "two_shot.html")) for word in words]
        done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
    assert (tmp_path / "two_shot.html").read_text().startswith("<!")


def test_a_script_without_a_plan_is_an_error(tmp_path: Path) -> None:
    for text, said in ("print('hello')", "printed"), ("raise SystemExit(3)", "failed (exit status: 3)"):
        script = tmp_path / "script.py"
        script.write_text(text)
        command = [sys.executable, "-m", "antiphon", "plan", "build", str(script)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 1 and done.stdout == "" and said in done.stderr
