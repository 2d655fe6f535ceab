"""scripts/figures.py: the docs' figures are those of their records, and a record tells its facts."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

RECORD = """\
# command: antiphon bench
# machine: 2 × a GPU
# commit: 0123abc
# date: 2026-11-25
# all_reduce
    size     ours     nccl
    1024     2.27     7.40
    4096     1234     8.00
# broadcast
    1024     9.90     9.90
"""
PAGE = """\
# Figures

<!-- figures box/2026-11-25-bench.txt
name 1024 = 1024
skip bound
before ^# broadcast
cell 1: ^ +{row} +(\\S+)
cell 2: ^ +{row} +\\S+ +(\\S+)
-->
| bytes | ours | NCCL | bound |
| --- | --- | --- | --- |
| 1,024 | 2.3 | 7.4 | 1.5 |
| 4,096 | 1,234 | 8.0 | 1,000 |

<!-- figures box/2026-11-25-bench.txt
after ^# broadcast
text takes ([0-9.]+) µs
line ^ +1024 +(\\S+)
-->
A broadcast takes 9.9 µs.
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A page with a table and a sentence, and their record."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "benches/results/box").mkdir(parents=True)
    (tmp_path / "docs/page.md").write_text(PAGE)
    (tmp_path / "README.md").write_text("# Nothing\n")
    (tmp_path / "benches/results/box/2026-11-25-bench.txt").write_text(RECORD)
    return tmp_path


def figures(root: Path, *arguments: str) -> tuple[int, str]:
    """The exit status and what it says."""
    command = [sys.executable, str(ROOT / "scripts/figures.py"), "--root", str(root), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


def change(file: Path, before: str, after: str) -> None:
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after))


def test_the_docs_have_the_figures_of_their_records() -> None:
    status, said = figures(ROOT)
    assert status == 0, said


def test_figures_that_agree_pass(checkout: Path) -> None:
    assert figures(checkout) == (0, "1 records, 2 pages, 0 problems\n")


@pytest.mark.parametrize(
    ("before", "after"), [("| 2.3 |", "| 2.4 |"), ("| 8.0 |", "| 9.0 |"), ("| 1,234 |", "| 1,235 |"), ("takes 9.9", "takes 9.8")]
)
def test_a_changed_figure_fails_and_writing_restores_it(checkout: Path, before: str, after: str) -> None:
    page = checkout / "docs/page.md"
    change(page, before, after)
    status, said = figures(checkout)
    assert status == 1 and "where the record has" in said
    figures(checkout, "--write")
    assert page.read_text() == PAGE and figures(checkout)[0] == 0


def test_a_cell_with_another_count_of_figures_fails(checkout: Path) -> None:
    change(checkout / "docs/page.md", "| 7.4 |", "| 7.4, 7.5 |")
    assert "2 numbers in '7.4, 7.5', 1 in the record" in figures(checkout)[1]


@pytest.mark.parametrize("sentence", ["It takes 7 µs.", "It takes 1.2 × NCCL's time.", "It moves 300 GB/s."])
def test_a_sentence_without_its_record_fails(checkout: Path, sentence: str) -> None:
    page = checkout / "docs/page.md"
    page.write_text(PAGE + f"\n{sentence}\n")
    status, said = figures(checkout)
    assert status == 1 and "without `<!-- figures RECORD` in front of the paragraph" in said
    page.write_text(PAGE + f"\n<!-- figures none: computed -->\n{sentence}\n\n```text\nWhat a program says:\n\n{sentence}\n```\n")
    assert figures(checkout)[0] == 0


def test_a_changed_record_fails(checkout: Path) -> None:
    change(checkout / "benches/results/box/2026-11-25-bench.txt", "7.40", "7.60")
    status, said = figures(checkout)
    assert status == 1 and "7.4 in '7.4', where the record has 7.6" in said


def test_a_row_that_the_record_lacks_or_has_twice_fails(checkout: Path) -> None:
    record = checkout / "benches/results/box/2026-11-25-bench.txt"
    change(checkout / "docs/page.md", "| 4,096 |", "| 8,192 |")
    assert "0 lines of 2026-11-25-bench.txt match" in figures(checkout)[1]
    change(checkout / "docs/page.md", "| 8,192 |", "| 4,096 |")
    change(record, "# broadcast", "    4096     1235     8.00\n# broadcast")
    assert "2 lines of 2026-11-25-bench.txt match" in figures(checkout)[1]


def test_a_table_of_figures_needs_a_record_or_a_reason(checkout: Path) -> None:
    readme = checkout / "README.md"
    table = "| | a | b |\n| --- | --- | --- |\n| x | 1.5 | 2.5 |\n"
    readme.write_text("# Nothing\n\n" + table)
    assert "README.md:3: a table of figures without" in figures(checkout)[1]
    readme.write_text("# Nothing\n\n<!-- figures none: computed -->\n" + table)
    assert figures(checkout)[0] == 0
    readme.write_text("# Nothing\n\n<!-- figures box/2026-11-25-other.txt\ncell: (x)\n-->\n" + table)
    assert "there is no record" in figures(checkout)[1]


@pytest.mark.parametrize("fact", ["command", "machine", "commit", "date"])
def test_a_record_without_a_fact_fails(checkout: Path, fact: str) -> None:
    record = checkout / "benches/results/box/2026-11-25-bench.txt"
    change(record, f"# {fact}:", f"# no {fact}:")
    status, said = figures(checkout)
    assert status == 1 and f"does not tell its {fact}" in said


def test_only_older_records_may_have_lost_a_fact(checkout: Path) -> None:
    folder = checkout / "benches/results/box"
    lost = RECORD.replace("0123abc", "not recorded: added by 0123abc")
    (folder / "2026-11-24-bench.txt").write_text(lost)
    assert figures(checkout)[0] == 0
    (folder / "2026-11-26-bench.txt").write_text(lost)
    assert "lost its commit" in figures(checkout)[1]
    (folder / "2026-11-26-bench.txt").write_text(RECORD.replace("0123abc", "0123abc-dirty"))
    assert "what it measured is in no commit" in figures(checkout)[1]


def test_records_of_json_are_lines_too(checkout: Path) -> None:
    (checkout / "benches/results/box/2026-11-25-bench.json").write_text(
        '{"command": "c", "machine": {"cpu": "x"}, "commit": "0", "date": "2026-11-25", "rows": [{"n": 1, "us": {"ours": 2.5}}, {"n": 2}]}'
    )
    (checkout / "README.md").write_text(
        "<!-- figures box/2026-11-25-bench.json\ntext takes ([0-9.]+)\nline \\|n=1\\|us.ours=([0-9.]+)\\|\n-->\nIt takes 2.5 µs.\n"
    )
    assert figures(checkout)[0] == 0
    change(checkout / "README.md", "2.5 µs", "2.6 µs")
    assert figures(checkout)[0] == 1


def test_the_writer_of_records_tells_all_facts(tmp_path: Path) -> None:
    def record(name: str, *command: str) -> None:
        writer = [sys.executable, str(ROOT / "benches/record.py"), str(tmp_path / "benches/results/box" / name), "--", *command]
        subprocess.run(writer, check=True, capture_output=True, env={"ANTIPHON_COMMIT": "0123abc", "PATH": "/usr/bin:/bin"})

    record("2026-11-25-said.txt", "echo", "a 1.5")
    record("2026-11-25-wrote.json", "sh", "-c", """echo '{"rows": [{"a": 1}]}' >{}""")
    (tmp_path / "README.md").write_text("# Nothing\n")
    (tmp_path / "docs").mkdir()
    assert figures(tmp_path) == (0, "2 records, 1 pages, 0 problems\n")
