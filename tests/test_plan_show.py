"""The page that ``antiphon plan show`` draws, in a browser.

It needs a Chromium: ``chromium``, ``chromium-browser`` or ``google-chrome`` in PATH, or the path in CHROME. Screenshots
stay in ``target/screenshots``.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROME = os.environ.get("CHROME") or next(filter(None, map(shutil.which, NAMES)), None)
SCREENSHOTS = Path(__file__).resolve().parent.parent / "target" / "screenshots"
needs_chromium = pytest.mark.skipif(CHROME is None, reason=f"needs chromium: none of {', '.join(NAMES)} in PATH, nor CHROME")


def chunk(index: int, size: int, kind: str = "i") -> dict[str, Any]:
    return {"type": kind, "index": index, "size": size}


def notify(name: str, channels: int) -> dict[str, Any]:
    return {"name": name, "channel_ids": list(range(channels)), "channel_type": "memory"}


def gpu(rank: int, ranks: int, blocks: int, rounds: int) -> dict[str, Any]:
    """A rank that puts its input everywhere, ``rounds`` times, and waits for what the others put."""
    peers = [peer for peer in range(ranks) if peer != rank]
    put = {
        "name": "put",
        "src_buff": [chunk(0, 1) for _ in peers],
        "dst_buff": [{"buffer_id": at, "index": rank, "size": 1} for at, _ in enumerate(peers)],
        "channel_type": "memory",
    }
    count = len(peers)
    ops = [put, notify("signal", count), notify("wait", count)] * rounds
    block = {
        "ops": ops,
        "remote_buffer_refs": [{"access_channel_type": "memory", "remote_buffer_ids": list(range(count))}],
    }
    channels = [[peer * blocks + at for peer in range(count)] for at in range(blocks)]
    return {
        "id": rank,
        "input_chunks": 1,
        "output_chunks": ranks,
        "scratch_chunks": 0,
        "threadblocks": [
            {"id": at, **block, "channels": [{"channel_type": "memory", "channel_ids": channels[at]}]}
            for at in range(blocks)
        ],
        "channels": [{"channel_type": "memory", "connected_to": [peer for peer in peers for _ in range(blocks)]}],
        "remote_buffers": [{"rank": peer, "type": "o", "access_channel_types": ["memory"]} for peer in peers],
        "semaphores": [],
    }


def plan(name: str, ranks: int, blocks: int = 2, rounds: int = 1) -> dict[str, Any]:
    gpus = [gpu(rank, ranks, blocks, rounds) for rank in range(ranks)]
    return {"name": name, "collective": "allgather", "gpus": gpus}


def antiphon(*arguments: str) -> str:
    command = [sys.executable, "-m", "antiphon", "plan", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def show(folder: Path, made: dict[str, Any]) -> Path:
    file, page = folder / "plan.json", folder / "plan.html"
    file.write_text(json.dumps(made))
    antiphon("show", str(file), "--html", str(page), "--size", "4M")
    return page


def browse(folder: Path, page: Path, *options: str, fragment: str = "") -> str:
    """What the page has become when it has been drawn, as HTML; nothing may have been said on the console."""
    assert CHROME is not None
    done = subprocess.run(
        [
            CHROME,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--enable-logging=stderr",
            f"--user-data-dir={folder / 'profile'}",
            "--window-size=1500,900",
            "--virtual-time-budget=5000",
            *options,
            page.as_uri() + fragment,
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr, done.stderr
    return done.stdout


def drawn(dom: str) -> dict[str, int]:
    """What the page says that it has drawn."""
    assert "data-error" not in dom.split(">", 2)[1], dom[:500]
    found = re.search(r'data-drawn="([^"]*)"', dom)
    assert found, dom[:500]
    counts: dict[str, int] = json.loads(html.unescape(found[1]))
    return counts


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_drawn(tmp_path: Path, scheme: str) -> None:
    page = show(tmp_path, plan("all-gather", 4))
    dark = ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
    dom = browse(tmp_path, page, "--dump-dom", *dark, fragment="#span=3")
    counts = drawn(dom)
    assert counts["lanes"] == 4 * 2
    assert counts["spans"] == 4 * 2 * 3
    assert counts["arrows"] == 4 * 2 * 3 * 2  # a signal and bytes to each peer
    assert "4 ranks on h200x4" in dom and "Critical path" in dom
    details = re.search(r'<div id="details">(.*?)</div>', dom, re.DOTALL)
    assert details and "put" in details[1] and "writes output[" in details[1] and "GB/s" in details[1], dom
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    picture = SCREENSHOTS / f"plan_show_{scheme}.png"
    picture.unlink(missing_ok=True)
    browse(tmp_path, page, f"--screenshot={picture}", *dark, fragment="#span=3")
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 20_000


@needs_chromium
def test_a_hostile_name_stays_text(tmp_path: Path) -> None:
    evil = "</script><img src=x onerror=alert(1)>{{data}}"
    dom = browse(tmp_path, show(tmp_path, plan(evil, 2)), "--dump-dom")
    drawn(dom)
    assert html.escape(evil, quote=False) in dom and "<img" not in dom


@needs_chromium
def test_hundreds_of_thread_blocks_and_a_hundred_thousand_operations(tmp_path: Path) -> None:
    page = show(tmp_path, plan("large", 8, blocks=32, rounds=131))
    counts = drawn(browse(tmp_path, page, "--dump-dom"))
    assert counts["lanes"] == 256 and counts["spans"] == 8 * 32 * 131 * 3


@needs_chromium
def test_a_plan_that_cannot_end_is_marked_where_it_waits(tmp_path: Path) -> None:
    stuck = plan("stuck", 2, blocks=1)
    stuck["gpus"][0]["threadblocks"][0]["ops"].pop(1)  # its signal
    dom = browse(tmp_path, show(tmp_path, stuck), "--dump-dom")
    assert drawn(dom)["marks"] == 2  # of the verifier: a signal too few, and the deadlock
    assert "waits for ever, for a signal on memory channel 0 of rank 1" in dom


def test_the_trace_is_what_perfetto_reads(tmp_path: Path) -> None:
    file, trace = tmp_path / "plan.json", tmp_path / "trace.json"
    file.write_text(json.dumps(plan("all-gather", 2)))
    antiphon("show", str(file), "--trace", str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 2 * 2 * 3


def test_a_prediction_as_a_table_and_as_json(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan("all-gather", 4)))
    table = antiphon("simulate", str(file), "--sizes", "1M..16M:4")
    assert "all-gather (allgather, 4 ranks) on h200x4" in table and "16777216" in table
    prediction = json.loads(antiphon("simulate", str(file), "--sizes", "1M..16M:4", "--json"))
    assert [row["bytes"] for row in prediction["rows"]] == [1 << 20, 4 << 20, 16 << 20]
    times = [row["time_us"] for row in prediction["rows"]]
    assert times == sorted(times)
    assert prediction["critical_path"][-1]["until_us"] + 0.51 == pytest.approx(times[-1])
