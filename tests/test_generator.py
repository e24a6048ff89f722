"""Records name the generator's version: bytes that change without it would make them lie."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
from builders import EXAMPLES, conv, nest_of

from looptune.build import generate
from looptune.lower import GENERATOR_VERSION
from looptune.schedule import Schedule, pack, parallel, parse_order
from looptune.target import TARGETS
from looptune.workloads import einsum

RECORD = Path(__file__).parent / "golden" / "generated_bytes.json"
MATMUL = nest_of("mk,kn->mn", m=20, k=30, n=40)
SCHEDULES = {
    **{name: parse_order(nest, order) for name, (nest, order) in EXAMPLES.items()},
    "accumulate": Schedule(replace(MATMUL, accumulate=True)),
    "maximum": Schedule(replace(nest_of("ij->i", i=9, j=70), reduction="max")),
    "float64": Schedule(einsum("mk,kn->mn", (5, 6), (6, 21), dtype="float64").nests[0]),
    "padded": Schedule(conv(3, 9, 4)),
    "packed": pack(Schedule(nest_of("mk,nk->mn", m=20, k=30, n=40)), 2, (1, 0)),
    "parallel": parallel(parse_order(MATMUL, "m:6 n:16 k m n"), 0),
}


def digests() -> dict[str, str]:
    return {
        f"{name} on {target.name}": hashlib.sha256(
            b"".join(generate(schedule, target).codes)
        ).hexdigest()[:16]
        for name, schedule in SCHEDULES.items()
        for target in TARGETS.values()
    }


def test_bytes_do_not_change_without_the_generator_version(request):
    found = {"generator_version": GENERATOR_VERSION, "digests": digests()}
    recorded = json.loads(RECORD.read_text()) if RECORD.exists() else {"generator_version": 0}
    if recorded["generator_version"] != GENERATOR_VERSION and request.config.getoption(
        "--update-golden"
    ):
        RECORD.write_text(json.dumps(found, indent=1) + "\n")
        pytest.skip("recorded the bytes of a new generator version")
    assert recorded["generator_version"] == GENERATOR_VERSION, "run pytest --update-golden"
    known = recorded["digests"]
    changed = [name for name, digest in found["digests"].items() if digest != known.get(name)]
    assert not changed, f"{changed} changed: raise GENERATOR_VERSION, then pytest --update-golden"
