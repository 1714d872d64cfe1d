"""Sets of time intervals as pairs of arrays: union, and what of one lies outside the others."""

from collections.abc import Sequence

import numpy as np

Intervals = tuple[np.ndarray, np.ndarray]
"""Starts and ends in µs; after :func:`union` sorted, and no two of them touch."""

NOTHING: Intervals = (np.empty(0), np.empty(0))


def union(start: np.ndarray, end: np.ndarray) -> Intervals:
    """The time covered by at least one interval."""
    if len(start) == 0:
        return NOTHING
    order = np.argsort(start, kind="stable")
    start, reached = start[order], np.maximum.accumulate(end[order])
    opens = np.flatnonzero(start[1:] > reached[:-1]) + 1
    first = np.concatenate(([0], opens))
    last = np.concatenate((opens - 1, [len(start) - 1]))
    return start[first], reached[last]


def length(of: Intervals) -> float:
    """Total time of a union, µs."""
    return float((of[1] - of[0]).sum())


def clip(of: Intervals, low: float, high: float) -> Intervals:
    """The part of a union between two times."""
    first, last = np.searchsorted(of[1], low, "right"), np.searchsorted(of[0], high, "left")
    return np.maximum(of[0][first:last], low), np.minimum(of[1][first:last], high)


def contains(of: Intervals, times: np.ndarray) -> np.ndarray:
    """Which times lie in a union (its starts included, its ends not)."""
    if len(of[0]) == 0:
        return np.zeros(len(times), bool)
    index = np.searchsorted(of[0], times, "right") - 1
    return (index >= 0) & (times < of[1][index])


def segments(*unions: Intervals) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut time wherever a union starts or ends.

    Returns starts, ends and, per segment, a number whose bit k is set where union k covers it.
    """
    edges = np.unique(np.concatenate([edge for of in unions for edge in of]))
    if len(edges) < 2:
        return np.empty(0), np.empty(0), np.empty(0, int)
    start, end = edges[:-1], edges[1:]
    cover = np.zeros(len(start), int)
    for bit, of in enumerate(unions):
        cover |= contains(of, start).astype(int) << bit
    return start, end, cover


def lengths(*unions: Intervals) -> np.ndarray:
    """µs by combination: entry 0b101 is the time that unions 0 and 2, and no other, cover."""
    start, end, cover = segments(*unions)
    return np.bincount(cover, weights=end - start, minlength=1 << len(unions))


def outside(of: Intervals, others: Sequence[Intervals]) -> Intervals:
    """The part of a union that none of the others covers."""
    start, end, cover = segments(of, *others)
    keep = cover == 1
    return union(start[keep], end[keep])


def both(a: Intervals, b: Intervals) -> Intervals:
    """The part that two unions share."""
    start, end, cover = segments(a, b)
    keep = cover == 3
    return union(start[keep], end[keep])
