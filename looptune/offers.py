"""The register tiles that a construction chooses from, and what a policy is told of each."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from looptune.default import priced_options, tiles
from looptune.graph import CANDIDATE_FEATURES, CANDIDATES
from looptune.ir import Nest
from looptune.lower.form import register_budget
from looptune.prices import Candidate, cycles
from looptune.target import Target

WORTHWHILE = 2.0  # times the cheapest candidate: beyond that a tile is not on offer
FEATURES = (
    "offered", "log price over the cheapest", "place", "vectors", "rows", "share of registers",
    "share of lanes used", "share of rows used", "vector is a reduction",
    "vector is the output's unit axis", "inputs of unit stride", "inputs that do not move",
    "panels", "write cache", "sweep", "whole rows",
)  # fmt: skip
assert len(FEATURES) == CANDIDATE_FEATURES


@dataclass(frozen=True)
class Tile:
    """A candidate with its predicted cycles."""

    option: Candidate
    cycles: float


@lru_cache(maxsize=2048)
def tiles_on_offer(nest: Nest, target: Target) -> tuple[Tile, ...]:
    """Up to `CANDIDATES` pairs of vector axis and tile, the cheapest first, each with the packs
    that make it so."""
    found: dict[tuple[int, tuple[tuple[int, int], ...]], Tile] = {}
    least = math.inf
    for bound, prices, option in priced_options(nest, target):
        if bound > WORTHWHILE * least:
            break
        for tile in tiles(nest, target, option):
            price = cycles(nest, prices, option.vector, dict(tile))
            known = found.get((option.vector, tile))
            if known is None or price < known.cycles:
                found.pop((option.vector, tile), None)  # equal prices stay in the order found
                found[option.vector, tile] = Tile(replace(option, tile=tile), price)
                least = min(least, price)
    order = sorted(found.values(), key=lambda tile: tile.cycles)
    return tuple(tile for tile in order[:CANDIDATES] if tile.cycles <= WORTHWHILE * least)


@lru_cache(maxsize=2048)
def features(nest: Nest, target: Target) -> np.ndarray:
    """`FEATURES` of the tiles on offer, float32 (CANDIDATES, CANDIDATE_FEATURES), read-only."""
    found = np.zeros((CANDIDATES, CANDIDATE_FEATURES), np.float32)
    offers = tiles_on_offer(nest, target)
    for place, tile in enumerate(offers):
        found[place] = (
            1.0, 4 * math.log(tile.cycles / offers[0].cycles), place / CANDIDATES,
            *described(nest, target, tile.option),
        )  # fmt: skip
    found.flags.writeable = False
    return found


def described(nest: Nest, target: Target, option: Candidate) -> tuple[float, ...]:
    """The features of a candidate that do not depend on its rivals."""
    vector, lanes = option.vector, target.lanes(nest.dtype)
    sizes = dict(option.tile)
    width = sizes.get(vector, lanes)
    rows = next((size for axis, size in option.tile if axis != vector), 1)
    along = next((axis for axis in sizes if axis != vector), None)
    extent = nest.axes[vector].extent
    vectors = math.ceil(width / lanes)
    lanes_used = extent / (math.ceil(extent / width) * vectors * lanes)
    length = 1 if along is None else nest.axes[along].extent
    strides = [operand.stride_of(vector) for operand in nest.inputs]
    return (
        vectors / 4, rows / 8, vectors * rows / register_budget(nest, target), lanes_used,
        length / (math.ceil(length / rows) * rows), float(nest.axes[vector].reduction),
        float(nest.output.stride_of(vector) == 1), float(strides.count(1)),
        float(strides.count(0)), float(len(option.panels)), float(option.cached),
        float(option.sweep), float(rows == length),
    )  # fmt: skip
