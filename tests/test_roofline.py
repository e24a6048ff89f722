"""The roofline of a machine: what is kept comes back, for this machine only."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from looptune import roofline
from looptune.database import Database
from looptune.host import fingerprint, host_target
from looptune.roofline import (
    DTYPES,
    FOOTPRINTS,
    Roofline,
    bandwidth_at,
    keep,
    kept,
    measure_roofline,
    together,
)

FOUND = Roofline(host_target().name, 2, {"float32": 2e11, "float64": 1e11}, {1024: 5e10, 99: 1e9})


def test_what_is_kept_comes_back(tmp_path):
    keep(Database(tmp_path / "kept.sqlite"), FOUND)
    assert kept(Database(tmp_path / "kept.sqlite"), host_target(), 2) == FOUND
    assert kept(Database(tmp_path / "kept.sqlite"), host_target(), 1) is None


def test_a_new_roofline_takes_the_place_of_the_old():
    database = Database(None)
    keep(database, FOUND)
    newer = Roofline(FOUND.target, 2, {"float32": 3e11}, {1024: 6e10})
    keep(database, newer)
    assert kept(database, host_target(), 2) == newer


def test_pruning_other_machines_leaves_this_one():
    database = Database(None)
    keep(database, FOUND)
    database.keep_rates("elsewhere", FOUND.target, 2, {"flops float32": 1.0})
    database.prune(machine=fingerprint().digest)
    assert kept(database, host_target(), 2) == FOUND
    assert database.rates("elsewhere", FOUND.target, 2) == {}


@pytest.mark.parametrize("threads", [1, 2])
def test_every_number_is_measured(threads):
    found = measure_roofline(host_target(), threads, seconds=0.01)
    assert (tuple(found.flops), tuple(found.bandwidth)) == (DTYPES, FOOTPRINTS)
    assert min(*found.flops.values(), *found.bandwidth.values()) > 1e8


def test_samplers_run_at_once_and_the_slowest_counts():
    both = Barrier(2, timeout=10)  # broken unless the two of them are in it together

    def sampler(seconds):
        def sample(calls):
            both.wait()
            return seconds * calls

        return sample

    with ThreadPoolExecutor(2) as pool:
        assert together([sampler(1.0), sampler(3.0)], pool)(2) == 6.0


def test_bandwidths_are_measured_once_a_power_of_two(monkeypatch):
    asked = []

    def copying(target, nbytes, threads, pool, seconds):
        asked.append((nbytes, threads))
        return float(nbytes)

    monkeypatch.setattr(roofline, "copying", copying)
    roofline.copied.cache_clear()
    sizes = (0, 5_000, 1 << 20, (1 << 20) + 999, 1 << 40)
    found = [bandwidth_at(host_target(), size) for size in sizes]
    assert found == [4096, 4096, 1 << 20, 1 << 20, FOOTPRINTS[-1]]
    bandwidth_at(host_target(), 1 << 20, threads=2)
    assert asked == [(4096, 1), (1 << 20, 1), (FOOTPRINTS[-1], 1), (1 << 20, 2)]
    roofline.copied.cache_clear()
