use super::*;
use crate::pattern::tests::BATCHES;
use crate::{Scheme, Shard};
use blockflash_ops::{Align, Mask};

fn plans(seqlen: usize, scheme: Scheme, mask: Mask) -> Vec<Plan> {
    packed_plans(seqlen, scheme, mask, None)
}

fn packed_plans(seqlen: usize, scheme: Scheme, mask: Mask, offsets: Option<&[i32]>) -> Vec<Plan> {
    let world = scheme.heads * scheme.keys;
    let pattern = Pattern::of(mask, seqlen, offsets).unwrap();
    let plan = |rank| {
        let shard = Shard::new(seqlen, world, rank).unwrap();
        Plan::dense(&Grid { scheme, shard }, &pattern).unwrap()
    };
    (0..world).map(plan).collect()
}

/// One sequence of several lengths, and packed batches.
fn batches() -> impl Iterator<Item = (usize, Option<&'static [i32]>)> {
    [0, 3, 40, 57].map(|rows| (rows, None)).into_iter().chain(BATCHES.map(|of| (41, Some(of))))
}

fn schemes() -> impl Iterator<Item = Scheme> {
    [(1, 1), (1, 2), (2, 2), (1, 3), (1, 5), (2, 4)]
        .into_iter()
        .map(|(heads, keys)| Scheme { heads, keys })
}

fn masks() -> Vec<Mask> {
    let sides = [None, Some(0), Some(2), Some(11), Some(19), Some(33)];
    let window = |left, right| Mask::Window { left, right, align: Align::TopLeft };
    let windows = sides.into_iter().flat_map(|left| sides.map(|right| window(left, right)));
    windows.chain([Mask::Full, Mask::causal()]).collect()
}

/// What a rank sends in a step is what the other one expects, forward and back.
#[test]
fn ranks_agree() {
    for (scheme, mask) in schemes().flat_map(|scheme| masks().into_iter().map(move |m| (scheme, m)))
    {
        for (seqlen, offsets) in batches() {
            let plans = packed_plans(seqlen, scheme, mask, offsets);
            for (rank, plan) in plans.iter().enumerate() {
                for (t, step) in plan.steps.iter().enumerate().skip(1) {
                    let theirs = &plans[step.to].steps[t];
                    assert_eq!((theirs.from, theirs.received), (rank, count(&step.sent)));
                    let calls: Vec<_> =
                        theirs.calls.iter().map(|call| call.part.keys.len()).collect();
                    let back: Vec<_> = step.returned.iter().map(|back| count(&back.rows)).collect();
                    assert_eq!(calls, back, "{scheme} {mask:?} {seqlen} {offsets:?}");
                }
            }
        }
    }
}

/// Every slot that is merged for a row of queries was written for it, and none twice. Of gradients
/// of keys none is written twice or left out; others are zeros.
#[test]
fn slots_hold_the_parts() {
    for (scheme, mask) in schemes().flat_map(|scheme| masks().into_iter().map(move |m| (scheme, m)))
    {
        for (seqlen, offsets) in batches() {
            for plan in packed_plans(seqlen, scheme, mask, offsets) {
                let calls = || plan.steps.iter().flat_map(|step| &step.calls);
                for (rows, slots) in &plan.queries.ranges {
                    for row in rows.clone() {
                        let written = calls().filter(|call| call.part.queries.contains(&row));
                        let mut written: Vec<_> = written.map(|call| call.slot).collect();
                        written.sort_unstable();
                        assert!(written.into_iter().eq(slots.clone()), "{mask:?} {row}");
                        assert!(!slots.is_empty() && slots.end <= plan.queries.count);
                    }
                }
                let back = || plan.steps.iter().flat_map(|step| &step.returned);
                for (rows, slots) in &plan.keys.ranges {
                    for row in rows.clone() {
                        let has = |back: &&Returned| back.rows.iter().any(|r| r.contains(&row));
                        let mut written: Vec<_> = back().filter(has).map(|b| b.slot).collect();
                        written.sort_unstable();
                        assert!(written.windows(2).all(|pair| pair[0] < pair[1]), "{mask:?}");
                        assert!(written.iter().all(|slot| slots.contains(slot)), "{mask:?}");
                    }
                }
                let covered = |slots: &Slots| slots.ranges.iter().map(|(rows, _)| rows.len()).sum();
                let rows: usize = covered(&plan.queries);
                assert_eq!(rows, covered(&plan.keys));
            }
        }
    }
}

/// A window of two of eight chunks needs keys of the neighbours only.
#[test]
fn windows_move_few_keys() {
    let scheme = Scheme { heads: 1, keys: 4 };
    let window = Mask::Window { left: Some(4), right: Some(0), align: Align::TopLeft };
    let sent = |mask| -> Vec<usize> {
        plans(80, scheme, mask).iter().map(|plan| plan.rows_sent()[0]).collect()
    };
    assert_eq!(sent(Mask::Full), [60; 4]);
    // Chunks of ten rows: to chunk c + 1 the last four of each; ranks 0 to 3 hold 0 and 7, 1 and 6,
    // 2 and 5, 3 and 4.
    assert_eq!(sent(window), [4, 8, 8, 4]);
    let plans = plans(80, scheme, window);
    let steps: Vec<_> =
        plans[1].steps.iter().map(|step| (step.received, step.calls.len())).collect();
    assert_eq!(steps, [(0, 2), (4, 1), (4, 1)]);
}

#[test]
fn unions_are_sorted_and_joined() {
    assert_eq!(union(vec![5..7, 0..2, 2..3, 9..9, 6..8]), [0..3, 5..8]);
    assert_eq!(count_before(&[0..3, 5..8], 6), 4);
}
