"""What `blockflash.distributed` decides without an exchange: rows, visits, costs."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from blockflash.distributed import Machine, Scheme, plan
from blockflash.distributed._grid import _steps
from blockflash.distributed._rows import cut, ranges
from blockflash.distributed._steps import parts_of


def test_every_row_has_one_rank() -> None:
    for seqlen, world in itertools.product((*range(9), 50, 97), range(1, 9)):
        chunks = [ranges(seqlen, world, rank) for rank in range(world)]
        found = [each[0] for each in chunks] + [each[1] for each in reversed(chunks)]
        assert list(itertools.chain(*found)) == list(range(seqlen))
        sizes = {len(chunk) for chunk in found}
        assert max(sizes) - min(sizes) <= 1
    # As in the Rust crate.
    assert ranges(80, 4, 1) == (range(10, 20), range(60, 70))


def test_a_sequence_is_cut_between_blocks() -> None:
    for seqlen, world, block in itertools.product((0, 1, 64, 700, 4099), range(1, 6), (64, 192)):
        chunks = [ranges(seqlen, world, rank, block) for rank in range(world)]
        found = [each[0] for each in chunks] + [each[1] for each in reversed(chunks)]
        assert list(itertools.chain(*found)) == list(range(seqlen))
        assert all(chunk.start % block == 0 or not chunk for chunk in found)
    # As in the Rust crate.
    assert cut((128, 64)) == 128 and cut((64, 192)) == 192 and cut(7) == 7
    assert ranges(1000, 2, 0, 128) == (range(256), range(768, 1000))


def test_consecutive_ranks_are_one_of_a_larger_kind() -> None:
    for seqlen, heads, keys in itertools.product((1, 7, 48, 53), (1, 2, 3), (1, 2, 4)):
        for group in range(keys):
            members = [ranges(seqlen, heads * keys, group * heads + i) for i in range(heads)]
            for chunk, of_group in zip((0, 1), ranges(seqlen, keys, group)):
                rows = sorted(itertools.chain(*(member[chunk] for member in members)))
                assert rows == list(of_group)


def assert_visits_are_the_mask(
    seqlen: int, groups: int, window: tuple[int, int], cu_seqlens: tuple[int, ...] | None = None
) -> None:
    left, right = window
    # The sequence of each row.
    of = [0] * seqlen
    if cu_seqlens is not None:
        bounds = enumerate(itertools.pairwise(cu_seqlens))
        of = [at for at, (start, end) in bounds for _ in range(start, end)]
    scheme = Scheme(1, groups)
    plans = [_steps(seqlen, scheme, group, window, cu_seqlens) for group in range(groups)]
    held = [list(itertools.chain(*ranges(seqlen, groups, group))) for group in range(groups)]
    for group, steps in enumerate(plans):
        positions, parts = held[group], parts_of(steps)
        pairs, home, filled = [], [], []
        assert len(steps) == len(plans[0]) and steps[0].source == steps[0].target == group
        for number, step in enumerate(steps):
            # What is received in a step is what the source sends.
            source = plans[step.source][number]
            assert source.target == group and all(each.start < each.stop for each in source.sent)
            rows = [row for each in source.sent for row in held[step.source][each]]
            assert step.received == len(rows) and (number > 0 or not rows)
            if number == 0:
                rows = positions
            else:  # No row comes that no call attends.
                attended = set(itertools.chain(*(rows[visit.keys] for visit in step.visits)))
                assert attended == set(rows) and len(set(rows)) == len(rows)
            for visit in step.visits:
                queries, keys = positions[visit.queries], rows[visit.keys]
                assert queries and keys and 0 <= visit.part < parts
                filled += [(visit.part, query) for query in queries]
                home += queries if visit.home else []
                bounds = list(itertools.pairwise(visit.cu_seqlens))
                assert not bounds or (bounds[-1][1] == len(queries) and visit.home)
                for (i, query), (j, key) in itertools.product(enumerate(queries), enumerate(keys)):
                    together = not bounds or any(a <= i < b and a <= j < b for a, b in bounds)
                    if (
                        together
                        and (visit.left < 0 or j >= i - visit.left)
                        and (visit.right < 0 or j <= i + visit.right)
                    ):
                        pairs.append((query, key))
        assert sorted(pairs) == sorted(
            (query, key)
            for query, key in itertools.product(positions, range(seqlen))
            if of[query] == of[key]
            and (left < 0 or key >= query - left)
            and (right < 0 or key <= query + right)
        )
        assert sorted(home) == sorted(positions) and len(set(filled)) == len(filled)
        if cu_seqlens is None and window in ((-1, -1), (-1, 0)) and seqlen >= 2 * groups:
            assert parts == groups and all(len(step.visits) == 1 for step in steps)


def test_visits_are_the_mask() -> None:
    chance = random.Random(0)
    for _ in range(400):
        seqlen = chance.randint(1, 40)
        window = tuple(chance.choice([-1, 0, chance.randint(0, seqlen + 2)]) for _ in range(2))
        assert_visits_are_the_mask(seqlen, chance.randint(1, 6), window)


def test_packed_visits_are_the_mask_of_each_sequence() -> None:
    chance = random.Random(1)
    for _ in range(600):
        longest = chance.choice([3, 12, 40])
        lengths = [chance.randint(0, longest) for _ in range(chance.randint(1, 40 // longest + 1))]
        seqlen = sum(lengths)
        window = tuple(chance.choice([-1, 0, chance.randint(0, seqlen + 2)]) for _ in range(2))
        cu_seqlens = (0, *itertools.accumulate(lengths))
        assert_visits_are_the_mask(seqlen, chance.randint(1, 6), window, cu_seqlens)


def test_sequences_within_a_rank_are_one_call_and_do_not_travel() -> None:
    for group in range(5):
        steps = _steps(40, Scheme(1, 5), group, (-1, 0), tuple(range(0, 41, 4)))
        assert len(steps) == parts_of(steps) == 1 and steps[0].visits[0].cu_seqlens == (0, 4, 8)


def test_only_keys_inside_the_window_travel() -> None:
    plans = [_steps(4096, Scheme(1, 8), group, (16, 0)) for group in range(8)]
    steps = plans[3]
    assert {step.source for step in steps if step.visits} == {3, 2, 4} and parts_of(steps) == 2
    for number, step in enumerate(steps[1:], 1):
        sent = plans[step.source][number].sent
        assert [rows.stop - rows.start for rows in sent] == [16] * bool(step.visits)
        assert step.received == 16 * bool(step.visits)


H200 = {"flops": 600e12, "copies": 1.9e12, "link": 250e9, "network": 45e9, "latency": 50e-6}
CASE = {"seqlen": 131072, "heads": 32, "heads_k": 8, "head_dim": 128}


def test_plan() -> None:
    machine = Machine(ranks=16, ranks_per_host=8, **H200)
    found = plan(machine, causal=True, **CASE)
    # As in the Rust crate.
    assert found[0].scheme == Scheme(8, 2)
    assert [row.scheme.heads for row in found] == [8, 4, 1, 2]
    assert [row.total for row in found] == sorted(row.total for row in found)
    ideal = 2 * 2 * 131072 * 131073 / 2 * 32 * 128 / 600e12 / 16
    assert all(row.ideal == pytest.approx(ideal) for row in found)
    assert str(found[0]).startswith("heads over 8, keys over 2: compute 14.89 ms")
    assert found[0].scaling < 1
    assert plan(machine, backward=True, **CASE)[0].total > 2 * found[0].total
    keys = next(row for row in found if row.scheme == Scheme(1, 16))
    # A window of 4096 keys is within the rows of a rank and those before its chunks.
    near = plan(machine, causal=True, window=(4096, None), **CASE)[0]
    assert near.ideal < 0.1 * ideal and near.sent_bytes < 0.2 * keys.sent_bytes
    # Sequences of 1024 rows are within ranks.
    packed = plan(machine, causal=True, cu_seqlens=range(0, 131073, 1024), **CASE)[0]
    assert packed.sent_bytes == 0 and packed.ideal == pytest.approx(ideal * 1025 / 131073)
    # A block mask that leaves a tenth.
    rows = plan(machine, causal=True, density=(0.1, 0.1), **CASE)
    sparse = next(row for row in rows if row.scheme == keys.scheme)
    assert sparse.ideal == pytest.approx(0.1 * ideal)
    assert sparse.sent_bytes == pytest.approx(0.1 * keys.sent_bytes)
    one = Machine(ranks=1, ranks_per_host=1, **H200)
    assert [str(row.scheme) for row in plan(one, **CASE)] == ["one rank"]


@pytest.mark.parametrize(
    ("ranks", "rates", "sizes"),
    [
        ({"ranks": 0}, {}, {}),
        ({"ranks": 1 << 40}, {}, {}),
        ({"ranks_per_host": -1}, {}, {}),
        ({}, {"link": 0.0}, {}),
        ({}, {"flops": float("nan")}, {}),
        ({}, {"latency": -1.0}, {}),
        ({}, {}, {"seqlen": 0}),
        ({}, {}, {"heads_k": 5}),
        ({}, {}, {"seqlen": 1 << 33}),
        ({}, {}, {"seqlen": 1 << 80}),
        ({}, {}, {"window": (-1, None)}),
        ({}, {}, {"cu_seqlens": []}),
        ({}, {}, {"cu_seqlens": [0, 131071]}),
        ({}, {}, {"cu_seqlens": [0, 3, 2, 131072]}),
        ({}, {}, {"cu_seqlens": [0, 131072], "batch": 2}),
        ({}, {}, {"density": (0.5, 1.5)}),
        ({}, {}, {"density": (float("nan"), 0.5)}),
        ({}, {}, {"density": (0.5, 0.5), "cu_seqlens": [0, 131072]}),
    ],
)
def test_plan_refuses(
    ranks: dict[str, int], rates: dict[str, float], sizes: dict[str, Any]
) -> None:
    machine = Machine(**({"ranks": 4, "ranks_per_host": 4} | H200 | ranks | rates))
    with pytest.raises(ValueError):
        plan(machine, **(CASE | sizes))
