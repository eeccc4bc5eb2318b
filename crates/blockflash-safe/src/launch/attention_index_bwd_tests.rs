use super::super::attention_bwd::tests::Tensors;
use super::super::attention_fixtures::scalars;
use super::super::attention_index_bwd_sizes::attention_index_bwd_workspace;
use super::*;
use crate::{Device, Tensor};
use blockflash_sys::manifest::kernels;

fn kernel(fits: impl Fn(AttentionIndexBwd) -> bool) -> IndexBackward {
    kernels().iter().filter_map(IndexBackward::of).find(|kernel| fits(kernel.0)).unwrap()
}

fn keys() -> (IndexBackward, AttentionIndexBwdTile) {
    let narrow =
        |tile: AttentionIndexBwdTile| (tile.types.q, tile.head_dims.qk) == (DType::F16, 64);
    let found = kernel(|kernel| matches!(kernel, AttentionIndexBwd::Keys(tile) if narrow(tile)));
    let AttentionIndexBwd::Keys(tile) = found.0 else { unreachable!() };
    (found, tile)
}

/// Of two sequences of 150 queries in 4 heads with 300 keys in 2 heads: 5 or 10 bins of 64 keys.
fn plan() -> AttentionIndexBwdPlan {
    let bwd = AttentionBwdPlan {
        scalars: scalars([150, 300], [0, 0]),
        sums_head_dim: None,
        heads_per_section: 1,
        parts: None,
    };
    let (_, tile) = keys();
    let (pass_queries, item_visits) = (300, 100);
    AttentionIndexBwdPlan { bwd, granularity_log2: 4, tile, pass_queries, item_visits }
}

fn tensors(bytes: usize) -> Tensors {
    Tensors::of(&[2, 150, 4, 64], &[2, 300, 2, 64], &[2, 4, 150], bytes, false)
}

/// CTAs and argument of a launch with lists of this shape.
fn fitted(
    of: &IndexBackward,
    plan: AttentionIndexBwdPlan,
    (pass, step): (usize, Step),
    lists: &[usize],
    bytes: usize,
) -> Fit<(i128, blockflash_attention_index_bwd_params)> {
    let stream = Device::cpu().stream().unwrap();
    let entries = Tensor::zeros(&stream, DType::I32, lists).unwrap();
    let mut tensors = tensors(bytes);
    let operands =
        AttentionIndexBwdOperands { attention: tensors.operands(), entries: entries.view() };
    let mut params = zeros::<IndexBackward>();
    let blocks = of.fit(&PassPlan { plan, pass, step }, &operands, &mut params)?;
    Ok((blocks, params))
}

const LISTS: [usize; 3] = [2, 300, 5];
const ROOM: usize = 1 << 23;

#[test]
fn launches_of_passes() {
    let transpose = kernel(|kernel| matches!(kernel, AttentionIndexBwd::Transpose { .. }));
    let sums = kernel(|kernel| kernel == AttentionIndexBwd::Sums { dtype: DType::F16 });
    let (keys, _) = keys();
    let launch = |of, pass_queries, at, lists: &[usize]| {
        fitted(of, AttentionIndexBwdPlan { pass_queries, ..plan() }, at, lists, ROOM).unwrap()
    };
    // Two sets of one list, 300 queries in two slabs, 10 bins, 1500 entries, 25 items.
    for (of, step, expected) in [
        (&transpose, Step::Count, 2 * 2),
        (&transpose, Step::Sum, 2),
        (&transpose, Step::Divide, 2),
        (&transpose, Step::List, 2 * 2),
        (&keys, Step::Keys, 2 * 25),
        (&sums, Step::SumKeys, 2 * 10),
        (&sums, Step::SumQueries, (300 * 4 * 8 + 255) / 256),
    ] {
        let (blocks, params) = launch(of, 300, (0, step), &LISTS);
        assert_eq!(blocks, expected, "{step:?}");
        assert_eq!((params.sets, params.set_lists, params.group, params.bins), (2, 1, 2, 10));
        assert_eq!((params.max_items, params.max_parts, params.slabs), (25, 30, 2));
        assert_eq!((params.first_pass, params.last_pass, params.step), (1, 1, step.code()));
    }
    // Lists of all heads of q, in passes of 128 queries: 2 lists of a set, 1280 entries.
    let lists = [4, 300, 5];
    let (blocks, params) = launch(&keys, 128, (1, Step::Keys), &lists);
    assert_eq!((blocks, params.max_items, params.slabs), (2 * 22, 22, 1));
    assert_eq!((params.first_query, params.queries, params.set_lists), (128, 128, 2));
    assert_eq!((params.group, params.first_pass, params.last_pass), (1, 0, 0));
    let (blocks, params) = launch(&sums, 128, (2, Step::SumQueries), &lists);
    assert_eq!((params.first_query, params.queries, params.last_pass), (256, 44, 1));
    assert_eq!(blocks, 6);
    let found = fitted(&keys, plan(), (0, Step::Count), &LISTS, ROOM).map(|_| ()).unwrap_err();
    assert!(found.contains("the kernel has no step Count"), "{found}");
}

#[test]
fn a_workspace_has_room_for_all_arrays() {
    let sizes = AttentionIndexBwdSizes {
        heads: [4, 2],
        head_dim_qk: 64,
        groups: 2,
        capacity: 5,
        granularity: 16,
        total_q: 300,
        batch: 2,
        keys: 300,
        packed: false,
        tile_keys: 64,
        tile_head_dim: 64,
        dq_columns: 2,
        pass_queries: 300,
        item_visits: 100,
    };
    let statistics = 2 * 4 * 192 * 8;
    let words = [2 * 25 * 4, 2 * 2 * 10, 2 * 10, 2 * 10, 2 * 10, 2 * 1500, 2 * 1500];
    let dq = 2 * 1500 * 2;
    let expected = statistics
        + 4 * words.iter().sum::<usize>()
        + dq * 64 * 2
        + dq * 2 * 4
        + 2 * 30 * 2 * 64 * 64 * 4;
    let bytes = attention_index_bwd_workspace(statistics, &sizes).unwrap();
    assert_eq!(bytes, expected);
    let (of, _) = keys();
    let at = (0, Step::Keys);
    fitted(&of, plan(), at, &LISTS, bytes).unwrap();
    let found = fitted(&of, plan(), at, &LISTS, bytes - 1).map(|_| ()).unwrap_err();
    assert!(found.contains(&format!("the workspace has {} bytes of {bytes}", bytes - 1)));
    let passes = AttentionIndexBwdSizes { pass_queries: 150, ..sizes };
    assert_eq!(passes.passes(), 2);
    // Half of the entries, and sums of all bins.
    let halved = attention_index_bwd_workspace(statistics, &passes).unwrap();
    assert!(halved < bytes && halved > 10 * 2 * 2 * 64 * 64 * 4);
    let most = i32::MAX as usize;
    let huge =
        AttentionIndexBwdSizes { capacity: most, total_q: most, pass_queries: most, ..sizes };
    assert_eq!(attention_index_bwd_workspace(statistics, &huge), None);
}

#[test]
fn what_does_not_fit_is_named() {
    let (of, _) = keys();
    let refused = |plan, lists: &[usize]| {
        fitted(&of, plan, (0, Step::Keys), lists, ROOM).map(|_| ()).unwrap_err()
    };
    for (plan, reason) in [
        (AttentionIndexBwdPlan { granularity_log2: 2, ..plan() }, "blocks of 2^2 keys"),
        (AttentionIndexBwdPlan { item_visits: 0, ..plan() }, "items have 0 visits"),
        (AttentionIndexBwdPlan { item_visits: 1 << 20, ..plan() }, "items have 1048576 visits"),
        (AttentionIndexBwdPlan { pass_queries: 0, ..plan() }, "a pass has 0 queries"),
    ] {
        let found = refused(plan, &LISTS);
        assert!(found.contains(reason), "{found}");
    }
    for (lists, reason) in [
        (&[3, 300, 5][..], "3 groups of lists, expected 1, 2 or 4"),
        (&[2, 299, 5], "expected i32 [2, 300, 5]"),
        (&[2, 300], "expected 3 dimensions"),
    ] {
        let found = refused(plan(), lists);
        assert!(found.contains(reason), "{found}");
    }
}
