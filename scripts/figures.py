"""Compares the figures of README.md and the pages of docs/ with the records of benches/results, and the records with what each must tell.

    python3 scripts/figures.py            # says which figures differ from their records; fails if any does
    python3 scripts/figures.py --write    # puts the records' figures in their places

A table whose cells are mostly numbers has a comment in front of it, which names its record and has a rule on each further line:

    <!-- figures h200-x2/2026-11-23-cuda-mixed.txt
    cell: {row}.*{head}\\s+(\\S+)
    -->

| rule | meaning |
| --- | --- |
| `cell: REGEX` | matches one line of the record for each cell; its groups are the numbers of the cell, in order |
| `cell 2: REGEX` | the same for the cells of column 2 alone, counted from 0 |
| `row TEXT: cell: REGEX`, `row TEXT: cell 2: REGEX` | the same in the row whose first cell is TEXT |
| `take N`, `take column` | behind a rule: of the lines that match, the N-th from 1, or that of the cell's column |
| `name TEXT = REGEX` | how the record calls a row or a column |
| `skip TEXT` | the figures of this row or column are computed |
| `keys N` | the first N columns are no figures; 1 if it is not said |
| `after REGEX`, `before REGEX` | the rules behind it mean only the lines between these of the record |
| `record NAME` | the rules behind it are about another record |

In a REGEX {row} is the first cell of the row, {cell 1} that of column 1, and {head} that of the column's head, without markup and, if they are
numbers, without commas.

Figures in sentences have two rules: the groups of `text REGEX` are numbers of the paragraph behind the comment, and those of the `line REGEX`
behind it the same numbers in the record. A paragraph that speaks of µs, of GB/s or of a multiple of NCCL's time has a comment, too.
`<!-- figures none: REASON -->` stands in front of numbers that are not measured.

A record of JSON is read as lines too, one for each of its rows, or one for all: `|key=value|key.inner=value|`.
"""

import argparse
import json
import re
import sys
from dataclasses import dataclass, field
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FACTS = ("command", "machine", "commit", "date")
#: A fact of an older record that nobody wrote down.
LOST = "not recorded"
#: From then on every record has all facts.
SINCE = date(2026, 11, 25)
NUMBER = re.compile(r"(?<![\w.])[−-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?|(?<![\w.])[−-]?\d+(?:\.\d+)?")
#: What a paragraph says of a measurement. A fenced block is of a program's output.
MEASURED = re.compile(r"\d µs|× NCCL|\d GB/s")
FENCE = re.compile(r"^ *```", re.MULTILINE)
MARKER = re.compile(r" *<!-- figures (.*?)--> *\n", re.DOTALL)


class Wrong(Exception):
    """What is wrong with a figure, a rule or a record."""


def value(text: str) -> float:
    return float(text.replace(",", "").replace("−", "-"))


def rounded(number: float, like: str) -> str:
    """A number with as many decimals as `like`, and commas where it has them."""
    decimals = len(like.partition(".")[2])
    text = f"{number:,.{decimals}f}" if "," in like else f"{number:.{decimals}f}"
    return text.replace("-", "−") if "−" in like else text


def agrees(text: str, number: float) -> bool:
    return abs(value(text) - number) <= 0.5 * 10.0 ** -len(text.partition(".")[2]) + 1e-9


# --- records --------------------------------------------------------------------------------------------------------------


def flat(found: object, prefix: str = "") -> str:
    """The leaves of JSON as `|key.inner=value`."""
    if isinstance(found, dict):
        return "".join(flat(inner, f"{prefix}.{key}" if prefix else key) for key, inner in found.items())
    if isinstance(found, list):
        return "".join(flat(inner, f"{prefix}.{index}") for index, inner in enumerate(found))
    return f"|{prefix}={found}"


@cache
def lines_of(path: Path) -> list[str]:
    """The lines of a record."""
    if not path.is_file():
        raise Wrong(f"there is no record {path}")
    text = path.read_text()
    if path.suffix != ".json":
        return text.splitlines()
    content = json.loads(text)
    rows = content.pop("rows", [])
    if isinstance(rows, dict):
        rows = [{"row": name, "value": row} for name, row in rows.items()]
    return [flat(content) + "|"] + [flat(row) + "|" for row in rows]


def facts_of(path: Path) -> dict[str, str]:
    """The facts that a record tells."""
    text = path.read_text()
    if path.suffix == ".json":
        return {name: str(fact) for name, fact in json.loads(text).items() if name in FACTS and fact}
    head = "\n".join(text.splitlines()[:12])
    return dict(re.findall(rf"^# ({'|'.join(FACTS)}): (.+)$", head, re.MULTILINE))


def problems_of_record(path: Path) -> list[str]:
    """What a record does not tell."""
    told = facts_of(path)
    missing = [f"{path} does not tell its {fact}" for fact in FACTS if not told.get(fact)]
    made = re.match(r"\d{4}-\d\d-\d\d", path.name)
    if not made:
        return [*missing, f"the name of {path} does not begin with a date"]
    if date.fromisoformat(made[0]) < SINCE:
        return missing
    missing += [f"{path} is not older than {SINCE} and lost its {fact}" for fact, text in told.items() if text.startswith(LOST)]
    if told.get("commit", "").endswith("-dirty"):
        missing.append(f"{path}: what it measured is in no commit")
    return missing


# --- rules ----------------------------------------------------------------------------------------------------------------


@dataclass
class Rule:
    """Where in a record the numbers of a cell or a sentence are."""

    pattern: str
    record: Path
    column: int | None = None
    row: str | None = None
    text: str | None = None
    after: str | None = None
    before: str | None = None
    take: int | str | None = None

    def numbers(self, names: dict[str, str], keys: dict[str, str], column: int = 0) -> list[float]:
        """The numbers that the record has for a place that is called so."""

        def called(match: re.Match[str]) -> str:
            plain = keys[match[1]]
            return names.get(plain, re.escape(plain))

        pattern = re.sub(r"\{(row|head|cell \d)\}", called, self.pattern)
        found = [match.groups() for line in self.lines() if (match := re.search(pattern, line))]
        if self.take is not None:
            at = column if self.take == "column" else int(self.take)
            found = found[at - 1 : at]
        if len(set(found)) != 1:
            raise Wrong(f"{len(found)} lines of {self.record.name} match {pattern!r}")
        return [value(group) for group in found[0]]

    def lines(self) -> list[str]:
        lines = lines_of(self.record)
        for limit, is_end in ((self.after, False), (self.before, True)):
            if limit is not None:
                at = next((at for at, line in enumerate(lines) if re.search(limit, line)), None)
                if at is None:
                    raise Wrong(f"no line of {self.record.name} matches {limit!r}")
                lines = lines[:at] if is_end else lines[at + 1 :]
        return lines


@dataclass
class Marker:
    """The rules of a comment."""

    rules: list[Rule] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    skips: set[str] = field(default_factory=set)
    keys: int = 1


def read(text: str, results: Path) -> Marker:
    """The rules of a comment's text, which begins with the record."""
    first, *lines = text.strip().splitlines()
    marker, record, scope, found = Marker(), results / first.strip(), dict[str, Any](), ""
    for line in map(str.strip, lines):
        word, _, rest = line.partition(" ")
        if word == "name":
            name, _, pattern = rest.partition(" = ")
            marker.names[name.strip()] = pattern
        elif word == "skip":
            marker.skips.add(rest)
        elif word == "keys":
            marker.keys = int(rest)
        elif word == "record":
            record, scope = results / rest, {}
        elif word in ("after", "before"):
            scope = {"after": rest} if word == "after" else scope | {"before": rest}
        elif word == "take":
            marker.rules[-1].take = rest
        elif word == "text":
            found = rest
        elif word == "line":
            marker.rules.append(Rule(rest, record, text=found, **scope))
        elif rule := re.fullmatch(r"(?:row (?P<row>.*?): )?cell(?: (?P<column>\d+))?: (?P<pattern>.*)", line):
            column = int(rule["column"]) if rule["column"] else None
            marker.rules.append(Rule(rule["pattern"], record, column, rule["row"], **scope))
        else:
            raise Wrong(f"not a rule: {line!r}")
    return marker


def plain(cell: str) -> str:
    """A cell without markup, and a number without commas."""
    cell = cell.replace("*", "").replace("`", "").strip()
    return cell.replace(",", "") if NUMBER.fullmatch(cell) else cell


def cells(line: str) -> list[str]:
    return re.split(r"(?<!\\)\|", line.strip().strip("|"))


def correct(text: str, numbers: list[float], where: str, problems: list[str]) -> str:
    """A text with the numbers of a record in the places of its own."""
    own = NUMBER.findall(text)
    if len(own) != len(numbers):
        problems.append(f"{where}: {len(own)} numbers in {text.strip()!r}, {len(numbers)} in the record")
        return text
    for mine, number in zip(own, numbers, strict=True):
        if not agrees(mine, number):
            problems.append(f"{where}: {mine} in {text.strip()!r}, where the record has {number:g}")
    given = iter(numbers)

    def right(match: re.Match[str]) -> str:
        number = next(given)
        return match[0] if agrees(match[0], number) else rounded(number, match[0])

    return NUMBER.sub(right, text)


def correct_table(table: list[str], marker: Marker, where: str, problems: list[str]) -> list[str]:
    head = [plain(cell) for cell in cells(table[0])]
    corrected = table[:2]
    for line in table[2:]:
        row = cells(line)
        for column in range(marker.keys, len(row)):
            if not NUMBER.search(row[column]):
                continue
            keys = {"row": plain(row[0]), "head": head[column]} | {f"cell {at}": plain(cell) for at, cell in enumerate(row)}
            if marker.skips & {keys["row"], keys["head"]}:
                continue
            here = f"{where}, {keys['row']}, {keys['head']}"
            fits = [r for r in marker.rules if r.text is None and r.row in (None, keys["row"]) and r.column in (None, column)]
            fits.sort(key=lambda rule: (rule.row is None, rule.column is None))
            try:
                if not fits:
                    raise Wrong("no rule")
                row[column] = correct(row[column], fits[0].numbers(marker.names, keys, column), here, problems)
            except Wrong as wrong:
                problems.append(f"{here}: {wrong}")
        corrected.append(line[: line.index("|") + 1] + "|".join(row) + "|")
    return corrected


def correct_sentences(text: str, marker: Marker, where: str, problems: list[str]) -> str:
    for rule in marker.rules:
        if rule.text is None:
            continue
        found = re.search(re.sub(r"\s+", r"\\s+", rule.text), text)
        if not found:
            problems.append(f"{where}: no sentence matches {rule.text!r}")
            continue
        try:
            numbers = rule.numbers(marker.names, {})
        except Wrong as wrong:
            problems.append(f"{where}: {wrong}")
            continue
        if len(numbers) != len(found.groups()):
            problems.append(f"{where}: {rule.text!r} and {rule.pattern!r} have different groups")
            continue
        for group in range(len(numbers), 0, -1):
            begin, end = found.span(group)
            new = correct(found[group], [numbers[group - 1]], where, problems)
            text = text[:begin] + new + text[end:]
    return text


def is_of_figures(table: list[str]) -> bool:
    """Whether more than half of its cells behind the first column are numbers."""
    found = [cell for line in table[2:] for cell in cells(line)[1:]]
    numbers = [cell for cell in found if re.fullmatch(rf"\W*(?:{NUMBER.pattern})[^A-Za-z]*", cell.strip())]
    return len(numbers) * 2 > len(found)


# --- pages ----------------------------------------------------------------------------------------------------------------


def correct_page(page: Path, root: Path, results: Path, problems: list[str]) -> str:
    """The page with the figures of its records. Problems name it by its path from `root`."""
    text = page.read_text()
    parts = re.split(r"(?<=\n)(\n+)", text)  # paragraphs and what is between them
    is_output = False
    for at, part in enumerate(parts):
        begins_as_output = is_output
        is_output ^= len(FENCE.findall(part)) % 2 == 1
        where = f"{page.relative_to(root)}:{text.count(chr(10), 0, sum(map(len, parts[:at]))) + 1}"
        marked = MARKER.match(part)
        body = part[marked.end() :] if marked else part
        lines = body.strip("\n").splitlines()
        begins = next((at for at, line in enumerate(lines) if re.fullmatch(r"\s*\|[\s:|-]+\|", line)), 0)
        table = lines[begins - 1 :] if begins else []
        if marked is None:
            if table and is_of_figures(table):
                problems.append(f"{where}: a table of figures without `<!-- figures RECORD` in front of it")
            elif not begins_as_output and not FENCE.search(body) and (measured := MEASURED.search(body)):
                problems.append(f"{where}: {measured[0]!r} without `<!-- figures RECORD` in front of the paragraph")
            continue
        if marked[1].startswith("none: "):
            continue
        try:
            marker = read(marked[1], results)
        except Wrong as wrong:
            problems.append(f"{where}: {wrong}")
            continue
        if table and any(rule.text is None for rule in marker.rules):
            lines[begins - 1 :] = correct_table(table, marker, where, problems)
            body = "\n".join(lines) + "\n"
        parts[at] = marked[0] + correct_sentences(body, marker, where, problems)
    return "".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the records' figures in their places")
    parser.add_argument("--root", type=Path, default=ROOT, help="of another checkout")
    arguments = parser.parse_args()
    results = arguments.root / "benches" / "results"
    records = sorted(path for path in results.rglob("*") if path.is_file())
    problems = [problem for record in records for problem in problems_of_record(record)]
    pages = [arguments.root / "README.md", *sorted((arguments.root / "docs").rglob("*.md"))]
    for page in pages:
        text = correct_page(page, arguments.root, results, problems)
        if arguments.write:
            page.write_text(text)
    if not records:
        problems.append(f"there are no records in {results}")
    print(*problems, f"{len(records)} records, {len(pages)} pages, {len(problems)} problems", sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
