use super::super::attention_decode::AttentionDecodeOperands;
use super::super::attention_fixtures::PLAIN_SCORES;
use super::super::attention_index_tma::United;
use super::super::checked::{Launch, zeros};
use super::super::{IndexUnionPlan, KvCacheViews, ScoreTerms};
use super::{AttentionIndexOperands, AttentionIndexPlan};
use crate::{BsrPartsMemory, DType, Device, Kernel, Stream, Tensor};
use blockflash_sys::HeadDims;
use blockflash_sys::manifest::{AttentionIndex, IndexUnion, kernels};

const PLAN: AttentionIndexPlan = AttentionIndexPlan {
    scores: PLAIN_SCORES,
    longest: 4,
    longest_kv: 90,
    granularity_log2: 4,
    chunk: 64,
    run_log2: 0,
};

/// Two sequences of 4 queries of 8 heads, 2 heads of keys, and lists of 12 blocks of 16 keys.
struct Fixture {
    stream: Stream,
    q: Tensor,
    k: Tensor,
    table: Tensor,
    lengths: Tensor,
    entries: Tensor,
    offsets: Tensor,
    memory: BsrPartsMemory,
}

impl Fixture {
    fn new() -> Self {
        let stream = Device::cpu().stream().unwrap();
        let ints = |shape: &[usize]| Tensor::zeros(&stream, DType::I32, shape).unwrap();
        let rows = |shape: &[usize]| Tensor::zeros(&stream, DType::BF16, shape).unwrap();
        let memory = Tensor::zeros(&stream, DType::F32, &[1 << 20]).unwrap();
        Self {
            q: rows(&[2, 4, 8, 64]),
            k: rows(&[6, 32, 2, 64]),
            table: ints(&[2, 3]),
            lengths: ints(&[2]),
            entries: ints(&[2, 8, 12]),
            offsets: ints(&[3]),
            memory: BsrPartsMemory::from_tensor(memory, 1 << 12).unwrap(),
            stream,
        }
    }

    fn operands<'a>(&'a self, o: &'a mut Tensor) -> AttentionIndexOperands<'a> {
        let (k, table) = (self.k.view(), Some(self.table.view()));
        let seqused = Some(self.lengths.view());
        let attention = AttentionDecodeOperands {
            q: Some(self.q.view()),
            cache: KvCacheViews { k, v: k, block_table: table, seqused, scales: [None; 2] },
            o: o.view_mut(),
            lse: None,
            sink: None,
            cu_seqlens_q: None,
            pages: None,
            terms: ScoreTerms::default(),
            tail_mask: None,
            workspace: Some(&self.memory),
        };
        AttentionIndexOperands { attention, entries: self.entries.view(), cu_seqlens_kv: None }
    }

    fn output(&self) -> Tensor {
        Tensor::zeros(&self.stream, DType::BF16, &[2, 4, 8, 64]).unwrap()
    }
}

/// The first kernel of a family for bf16 with 64 columns, or with other ones.
fn kernel<L: Launch>(fits: impl Fn(&L) -> bool) -> (&'static Kernel, L) {
    let of = |kernel| Some((kernel, L::of(kernel)?));
    kernels().iter().filter_map(of).find(|(_, tile)| fits(tile)).unwrap()
}

fn portable() -> (&'static Kernel, AttentionIndex) {
    kernel(|index: &AttentionIndex| {
        let tile = index.tile;
        (tile.types.q, tile.head_dims.qk, tile.rows) == (DType::BF16, 64, 16)
    })
}

#[test]
fn items_are_splits_of_all_units_of_all_queries() {
    let fixture = Fixture::new();
    let (_, tile) = portable();
    let items = |plan: AttentionIndexPlan| {
        let mut o = fixture.output();
        let mut params = zeros::<AttentionIndex>();
        let items = tile.fit(&plan, &fixture.operands(&mut o), &mut params);
        items.map(|items| (items, params))
    };
    // 192 positions.
    let (found, params) = items(PLAN).unwrap();
    assert_eq!((found, params.units, params.scaled.decode.group), (8 * 2 * 3, 2, 4));
    assert_eq!((params.lists.groups, params.lists.queries, params.lists.capacity), (2, 8, 12));
    let decode = &params.scaled.decode;
    assert_eq!((decode.items, decode.partial_rows, decode.total_q), (48, 4, 0));
    assert!(!decode.partial_sums.is_null() || fixture.memory.view().device_ptr().is_none());
    let runs = AttentionIndexPlan { run_log2: 1, ..PLAN };
    assert_eq!(items(runs).unwrap().0, 8 * 2 * 2);
    let whole = AttentionIndexPlan { chunk: 192, ..PLAN };
    assert_eq!(items(whole).unwrap().0, 8 * 2);
    for (plan, reason) in [
        (AttentionIndexPlan { chunk: 96, ..PLAN }, "splits have 96 positions"),
        (AttentionIndexPlan { chunk: 0, ..PLAN }, "splits have 0 positions"),
        (AttentionIndexPlan { run_log2: 5, ..PLAN }, "run_log2 is 5"),
        (AttentionIndexPlan { granularity_log2: 5, ..PLAN }, "blocks of 2^5 keys"),
        (AttentionIndexPlan { granularity_log2: -1, ..PLAN }, "blocks of 2^-1 keys"),
    ] {
        let found = items(plan).map(|(items, _)| items).unwrap_err();
        assert!(found.contains(reason), "{found}");
    }
}

#[test]
fn operands_that_do_not_fit_are_named() {
    let fixture = Fixture::new();
    let (_, tile) = portable();
    let ints = |shape: &[usize]| Tensor::zeros(&fixture.stream, DType::I32, shape).unwrap();
    let others = [ints(&[3, 8, 12]), ints(&[2, 7, 12]), ints(&[2, 8]), ints(&[2, 12, 8])];
    for (entries, reason) in others.iter().zip([
        "3 groups of lists, expected 1, 2 or 8",
        "expected i32 [2, 8, 12]",
        "expected 3 dimensions",
        "expected i32 [2, 8, 8]",
    ]) {
        let mut o = fixture.output();
        let entries = entries.view();
        let operands = AttentionIndexOperands { entries, ..fixture.operands(&mut o) };
        let found = tile.fit(&PLAN, &operands, &mut zeros::<AttentionIndex>()).unwrap_err();
        assert!(found.contains(reason), "{found}");
    }
    let mut o = fixture.output();
    let mut operands = fixture.operands(&mut o);
    operands.attention.workspace = None;
    let none = tile.fit(&PLAN, &operands, &mut zeros::<AttentionIndex>()).unwrap_err();
    assert!(none.contains("3 splits have no workspace"), "{none}");

    // Packed keys are one page, without a table and lengths.
    let mut o = fixture.output();
    let offsets = Some(fixture.offsets.view());
    let mut operands =
        AttentionIndexOperands { cu_seqlens_kv: offsets, ..fixture.operands(&mut o) };
    let fit = |operands: &AttentionIndexOperands<'_>| {
        let mut params = zeros::<AttentionIndex>();
        tile.fit(&PLAN, operands, &mut params).map(|_| params)
    };
    let found = fit(&operands).map(|_| ()).unwrap_err();
    assert!(found.contains("block_table"), "{found}");
    operands.attention.cache.block_table = None;
    operands.attention.cache.seqused = None;
    let found = fit(&operands).map(|_| ()).unwrap_err();
    assert!(found.contains("packed keys have 6 pages"), "{found}");
    let keys = Tensor::zeros(&fixture.stream, DType::BF16, &[1, 100, 2, 64]).unwrap();
    (operands.attention.cache.k, operands.attention.cache.v) = (keys.view(), keys.view());
    let params = fit(&operands).unwrap();
    let cache = &params.scaled.decode.cache;
    assert_eq!((cache.pages, cache.page_size, cache.capacity), (1, 100, 90));
}

/// A pair of launches has room for the entries of all lists of its tiles.
#[test]
fn united_lists_fit_into_the_workspace() {
    let fixture = Fixture::new();
    let (_, union) = kernel(|_: &IndexUnion| true);
    let (_, attention) = kernel(|united: &United| {
        (united.0.types.q, united.0.head_dims) == (DType::BF16, HeadDims::all(64))
    });
    // Groups of 4 heads, 16 queries of a row group: one tile of each unit of each sequence.
    let plan = IndexUnionPlan { index: PLAN, first: 0, count: 4, box_rows: 16 };
    let mut o = fixture.output();
    let mut params = zeros::<IndexUnion>();
    assert_eq!(union.fit(&plan, &fixture.operands(&mut o), &mut params), Ok(4));
    let unions = params.unions;
    assert_eq!((unions.pack, unions.pack_queries, unions.packs), (4, 16, 1));
    assert_eq!((unions.member_words, unions.first, unions.count), (1, 0, 4));
    let mut fit = |plan: IndexUnionPlan| {
        let mut params = zeros::<United>();
        attention.fit(&plan, &fixture.operands(&mut o), &mut params)
    };
    assert_eq!(fit(plan), Ok(4));
    assert_eq!(fit(IndexUnionPlan { first: 1, count: 3, ..plan }), Ok(3));
    for (plan, reason) in [
        (IndexUnionPlan { first: 1, ..plan }, "4 tiles from 1 on, of 4"),
        (IndexUnionPlan { count: 0, ..plan }, "0 tiles"),
        (IndexUnionPlan { first: -1, ..plan }, "from -1 on"),
        (IndexUnionPlan { box_rows: 32, ..plan }, "boxes have 32 slots"),
        (IndexUnionPlan { box_rows: 8, ..plan }, "boxes have 8 slots"),
        (
            IndexUnionPlan { index: AttentionIndexPlan { granularity_log2: 2, ..PLAN }, ..plan },
            "blocks of 4 keys, expected at least 16",
        ),
    ] {
        let found = fit(plan).unwrap_err();
        assert!(found.contains(reason), "{found}");
    }
}
