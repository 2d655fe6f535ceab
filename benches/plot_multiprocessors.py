"""The curve of a dispatch and a combine by the number of multiprocessors, beside the links' floor, as an SVG file.

    python benches/plot_multiprocessors.py benches/results/MACHINE/DATE-moe-multiprocessors.txt docs/design/moe-multiprocessors.svg
"""

import argparse
import math
import re
from pathlib import Path

#: The rows of the record that are drawn, with their colours, which differ in lightness too.
CURVES = {"dispatch bf16": "#1b6ca8", "combine bf16": "#d1495b", "dispatch fp8": "#66a182"}
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 400, 60, 150, 20, 50
#: µs at the ends of the axis.
LEAST, MOST = 64, 4096
_ROW = re.compile(r"^ +(\d+) +(\S.*?) +[\d.]+ +(\d+) +([\d.]+) +[\d.]+$")


def read(path: Path) -> dict[str, list[tuple[int, float, float]]]:
    """For each call the multiprocessors, the floor and the time of an eager call, of the record's first machine."""
    found: dict[str, list[tuple[int, float, float]]] = {name: [] for name in CURVES}
    for line in path.read_text().splitlines():
        row = _ROW.match(line)
        if row and row[2] in found and all(sms != int(row[1]) for sms, _, _ in found[row[2]]):
            found[row[2]].append((int(row[1]), float(row[3]), float(row[4])))
    return found


def draw(curves: dict[str, list[tuple[int, float, float]]], title: str) -> str:
    sms = sorted({point[0] for points in curves.values() for point in points})
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def x(number: float) -> float:
        return LEFT + (right - LEFT) * math.log(number / sms[0]) / math.log(sms[-1] / sms[0])

    def y(us: float) -> float:
        return bottom - (bottom - TOP) * math.log(us / LEAST) / math.log(MOST / LEAST)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f"<title>{title}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    us = LEAST
    while us <= MOST:
        parts.append(f'<path d="M{LEFT} {y(us):.1f}H{right}" stroke="#ddd"/><text x="{LEFT - 6}" y="{y(us) + 4:.1f}" text-anchor="end">{us}</text>')
        us *= 2
    parts += [f'<text x="{x(number):.1f}" y="{bottom + 16}" text-anchor="middle">{number}</text>' for number in sms]
    parts.append(f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 12}" text-anchor="middle">multiprocessors</text>')
    parts.append(f'<text x="14" y="{(TOP + bottom) / 2}" text-anchor="middle" transform="rotate(-90 14 {(TOP + bottom) / 2})">µs</text>')
    for (name, colour), points in zip(CURVES.items(), curves.values()):
        path = " ".join(f"{x(number):.1f},{y(time):.1f}" for number, _, time in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x(number):.1f}" cy="{y(time):.1f}" r="3" fill="{colour}"/>' for number, _, time in points]
    # A combine of bf16 has the floor of a dispatch, and its curve ends near that one's, so labels have lines of their own.
    for place, (name, colour) in enumerate(sorted(CURVES.items(), key=lambda curve: -curves[curve[0]][-1][2])):
        at = y(curves[name][-1][2]) + (-8, 8, 4)[place]
        parts.append(f'<text x="{right + 8}" y="{at:.1f}" fill="{colour}">{name}</text>')
    for name in ("dispatch bf16", "dispatch fp8"):
        floor = curves[name][0][1]
        line = f'<path d="M{LEFT} {y(floor):.1f}H{right}" stroke="{CURVES[name]}" stroke-dasharray="4 4"/>'
        parts.append(line + f'<text x="{LEFT + 6}" y="{y(floor) - 5:.1f}" fill="{CURVES[name]}">floor of the links, {name.split()[1]}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    curves = read(arguments.record)
    if not all(curves.values()):
        raise SystemExit(f"{arguments.record}: no rows of {', '.join(name for name, points in curves.items() if not points)}")
    arguments.picture.write_text(draw(curves, "Times of dispatch and combine by the number of multiprocessors"))


if __name__ == "__main__":
    main()
