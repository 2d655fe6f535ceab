"""Probes: what MSCCL++ 0.9.0 makes of every pair of neighbours, hazard and wrong use, and what ours makes of the same
script, run unchanged under its names."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROBES = Path(__file__).resolve().parent / "golden" / "mscclpp" / "probes"


def replicated_once(theirs: dict[str, Any]) -> dict[str, Any]:
    """The plan of a program that is serialised for the first time."""
    chunks = {"input_chunks": 8, "output_chunks": 8, "scratch_chunks": 0}
    memory = lambda ids: [{"channel_type": "memory", "channel_ids": ids}]
    after_copy = ["nop", "signal ch=0 channel_type=memory", "nop"]
    return {
        "r0.tb0": ["copy s=i[2+1] d=o[0+1]", *after_copy],
        "r0.tb1": ["copy s=i[3+1] d=o[1+1]", *after_copy],
        "r0": {**theirs["r0"], **chunks, "channels": [{"channel_type": "memory", "connected_to": [1, 1]}]},
        "r0.refs": [[0, memory([0]), []], [1, memory([1]), []]],
    }


def barriers_from_zero(theirs: list[dict[str, list[str]]]) -> list[dict[str, list[str]]]:
    """Each program's barriers counted from the start."""
    text = json.dumps(theirs)
    for leaked in "barrier_id=1", "barrier_id=2":
        text = text.replace(leaked, "barrier_id=0")
    return json.loads(text)


def packets_move_too(theirs: dict[str, Any]) -> dict[str, Any]:
    """Each instance with packets of its own."""
    ops = {f"r0.tb{i}": [theirs[f"r0.tb{i}"][0].replace("s[3+1]", f"s[{6 + i}+1]")] for i in (0, 1)}
    return {**theirs, **ops}


SAME_AS = "two equal Chunk objects in two switch ops"
COPY = "copy s=i[0+1] d=o[0+1]"
RES = "res s=i[0+1],i[1+1] d=o[0+1],r0[0+1] channel_type=memory reduce_op=sum"

#: Where ours differs on purpose: what it makes of theirs, and why. docs/guide/language.md has the same table in prose.
DIFFERENT: dict[str, dict[str, Any]] = {
    "autosync": {},
    "errors": {
        # Nothing can run a program for other ranks than its collective's, nor a channel of a rank to itself.
        "num_ranks smaller than the collective's": lambda _: "raises ValueError",
        "MemoryChannel to self": lambda _: "raises ValueError",
        "pairing: self channel": lambda _: "raises ValueError",
    },
    "fusion": {
        # The result is stored where the broadcast says, not where the sources are.
        "glre+gstore, other dst offset": lambda _: {
            "r0.tb0": ["glres s=sw0[0+1] d=sw0[3+1] channel_type=switch reduce_op=sum"]
        },
        # A nop at the end of a loop is at its end: it makes one behind the loop unnecessary, and none before it.
        "pipeline ending with nop | nop": lambda _: {"r0.tb0": ["pipeline{64,1: %s; nop}" % COPY]},
        "nop | pipeline{copy;nop} (leading nop is lost)": lambda _: {
            "r0.tb0": ["nop", "pipeline{64,1: %s; nop}" % COPY]
        },
        "signal both | pipeline{copy;nop}": lambda _: {
            "r0.tb0": ["nop", "signal ch=0 channel_type=memory", "nop", "pipeline{64,1: %s; nop}" % COPY]
        },
        # A loop is fused inside, whatever stood before it.
        "pipeline that absorbed a nop is not fused inside": lambda _: {"r0.tb0": ["pipeline{64,1: nop; %s}" % RES]},
    },
    "replicate": {
        # Instances write packets of their own.
        "recpkt local packet dst is not shifted": packets_move_too,
        # That a script used one object twice does not move its chunk twice.
        "one Chunk object in two switch ops": lambda _: expected("replicate")[SAME_AS],
        # Serialising does not change the program.
        "to_json twice, instances 2": replicated_once,
        # Programs do not number each other's barriers.
        "barrier ids across programs in one process": barriers_from_zero,
    },
}


def expected(probe: str) -> dict[str, Any]:
    return json.loads((PROBES / f"{probe}.json").read_text())


@pytest.mark.parametrize("probe", sorted(DIFFERENT))
def test_ours_is_theirs_but_for_what_is_fixed(probe: str) -> None:
    command = [sys.executable, "-m", "antiphon.compat", "run", str(PROBES / f"{probe}.py")]
    ours = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    theirs = expected(probe)
    assert ours.keys() == theirs.keys()
    for case, result in theirs.items():
        fix = DIFFERENT[probe].get(case)
        assert ours[case] == (fix(result) if fix else result), case


@pytest.mark.parametrize("probe", sorted(DIFFERENT))
def test_what_is_said_to_differ_does(probe: str) -> None:
    theirs = expected(probe)
    assert all(fix(theirs[case]) != theirs[case] for case, fix in DIFFERENT[probe].items())
