//! Runs scores on a device and checks everything that they write.

use super::{Keys, ScoresCase, gaps_stay, ints, text, with_gap};
use crate::attention::Choice;
use crate::gpu::wait;
use crate::host::{download, refill, upload};
use crate::number::{encode, poison};
use blockflash_ops::{
    BlockReduction, DType, Error, IndexScores, KvCache, Operation, PackedTokens, Stream, Tensor,
};
use blockflash_oracle::{Element, IndexQuery, index_block, index_scores_row};
use rayon::prelude::*;

/// The operands of a case on a device.
pub(super) struct ScoresInputs {
    case: ScoresCase,
    k: Tensor,
    q: Tensor,
    weights: Tensor,
    table: Tensor,
    lengths: Tensor,
    offsets_q: Tensor,
    offsets_kv: Tensor,
}

impl ScoresInputs {
    /// Uploads the data of a case.
    pub(super) fn upload(case: &ScoresCase, stream: &Stream) -> Result<Self, String> {
        let encoded =
            |values: &[f32]| values.iter().map(|&x| encode(case.dtype, x)).collect::<Vec<u32>>();
        let ScoresCase { dtype, head_dim, heads_kv, .. } = *case;
        let (rows, batch, heads) = (&case.rows, case.rows.batch(), case.heads());
        let ([pages, page_size], mut keys) = (case.pages(), case.k());
        let mut k_shape = [pages, page_size, heads_kv, head_dim];
        if matches!(rows.keys, Keys::Paged { heads_first: true, .. }) {
            let by_slot = keys.clone();
            keys.chunks_exact_mut(head_dim).enumerate().for_each(|(at, row)| {
                let (slot, head) = (at % page_size, at / page_size % heads_kv);
                let page = at / page_size / heads_kv;
                let from = ((page * page_size + slot) * heads_kv + head) * head_dim;
                row.copy_from_slice(&by_slot[from..][..head_dim]);
            });
            k_shape = [pages, heads_kv, page_size, head_dim];
        }
        let q_shape = match rows.packed {
            true => vec![rows.rows(), heads, head_dim],
            false => vec![batch, rows.queries[0], heads, head_dim],
        };
        let lengths = if rows.keys == Keys::Packed { vec![0; batch] } else { rows.lengths.clone() };
        let offsets_kv =
            if rows.keys == Keys::Packed { rows.offsets_kv() } else { vec![0; batch + 1] };
        Ok(Self {
            k: upload(stream, dtype, &encoded(&keys), &k_shape)?,
            q: upload(stream, dtype, &encoded(&case.q()), &q_shape)?,
            weights: Tensor::from_slice(stream, &case.weights(), &[rows.rows(), heads])
                .map_err(text)?,
            table: ints(stream, &case.table(), &[batch, case.max_pages()])?,
            lengths: ints(stream, &lengths, &[batch])?,
            offsets_q: ints(stream, &rows.offsets_q(), &[batch + 1])?,
            offsets_kv: ints(stream, &offsets_kv, &[batch + 1])?,
            case: case.clone(),
        })
    }

    /// The call.
    pub(super) fn call(&self) -> IndexScores<'_> {
        let (case, rows) = (&self.case, &self.case.rows);
        let k = match rows.keys {
            Keys::Paged { heads_first: true, .. } => {
                self.k.view().permute(&[0, 2, 1, 3]).expect("four dimensions")
            }
            _ => self.k.view(),
        };
        let is_packed = rows.keys == Keys::Packed;
        let cache = KvCache {
            block_table: matches!(rows.keys, Keys::Paged { .. }).then(|| self.table.view()),
            seqused_kv: (rows.given && !is_packed).then(|| self.lengths.view()),
            ..KvCache::new(k, k)
        };
        let packed = |offsets, max_seqlen| PackedTokens { cu_seqlens: offsets, max_seqlen };
        IndexScores {
            packed: rows.packed.then(|| packed(self.offsets_q.view(), rows.max_seqlen_q())),
            packed_kv: is_packed.then(|| packed(self.offsets_kv.view(), rows.capacity)),
            weights: case.weighted.then(|| self.weights.view()),
            mask: rows.mask(),
            reduction: if case.mean { BlockReduction::Mean } else { BlockReduction::Max },
            relu: case.relu,
            scale: case.scale,
            ..IndexScores::new(self.q.view(), cache, rows.granularity)
        }
    }

    fn run(
        &self,
        kernel: Choice,
        hidden: bool,
        out: &mut Tensor,
        stream: &Stream,
    ) -> Result<(), Error> {
        let call = IndexScores { leaves_hidden: hidden, ..self.call() };
        let blocks = self.blocks();
        let out = out.view_mut().slice(2, 0..blocks)?;
        match kernel {
            Choice::Selected => call.run(out, stream),
            Choice::This(kernel) => call.run_with(kernel, out, stream),
        }
    }

    /// Columns of the scores. The capacity of packed keys is at most all of them.
    pub(super) fn blocks(&self) -> usize {
        let (rows, [_, slots]) = (&self.case.rows, self.case.pages());
        let capacity = match rows.keys {
            Keys::Packed => rows.capacity.min(slots),
            _ => rows.capacity,
        };
        capacity.div_ceil(rows.granularity)
    }
}

/// The scores of the blocks of a case by their definition: for each group and row, those of the
/// blocks that the query sees.
struct Expected {
    case: ScoresCase,
    q: Vec<f32>,
    k: Vec<f32>,
    weights: Vec<f32>,
    table: Vec<i32>,
}

impl Expected {
    fn new(case: &ScoresCase) -> Self {
        let (q, k, weights) = (case.q(), case.k(), case.weights());
        Self { case: case.clone(), q, k, weights, table: case.table() }
    }

    fn query(&self, [group, row]: [usize; 2]) -> IndexQuery<'_> {
        let (case, d) = (&self.case, self.case.head_dim);
        let heads = group * case.heads_of_group..(group + 1) * case.heads_of_group;
        let heads = heads.map(|head| {
            let at = row * case.heads() + head;
            let weight = if case.weighted { self.weights[at] } else { 1.0 };
            (&self.q[at * d..][..d], weight)
        });
        IndexQuery { heads: heads.collect(), scale: case.scale, relu: case.relu }
    }

    fn key(&self, sequence: usize, key: usize, head: usize) -> &[f32] {
        let (case, [_, page_size]) = (&self.case, self.case.pages());
        let [page, slot] = match case.rows.keys {
            Keys::Contiguous => [sequence, key],
            Keys::Packed => [0, case.rows.offsets_kv()[sequence] as usize + key],
            Keys::Paged { .. } => {
                let column = sequence * case.max_pages() + key / page_size;
                [self.table[column] as usize, key % page_size]
            }
        };
        &self.k[((page * page_size + slot) * case.heads_kv + head) * case.head_dim..]
            [..case.head_dim]
    }

    /// Checks the row of a group and a query.
    fn check(&self, at: [usize; 2], found: &[f32], hidden: bool) -> Result<(), String> {
        let (case, rows) = (&self.case, self.case.rows.visible());
        let (sequence, seen) = &rows[at[1]];
        let (query, head) = (self.query(at), at[0] / case.groups_of_key);
        let of_key = |key: usize| query.key(self.key(*sequence, key, head));
        let granularity = case.rows.granularity;
        let shown = case.rows.blocks_of(seen);
        let expected: Vec<Element> = (0..found.len())
            .map(|block| {
                let start = (block * granularity).max(seen.start);
                let end = ((block + 1) * granularity).min(seen.end);
                let keys: Vec<Element> = (start..end.max(start)).map(of_key).collect();
                index_block(&keys, case.mean)
            })
            .collect();
        // What hidden blocks hold may be anything.
        let range = if hidden { shown } else { 0..found.len() };
        let rounding = query.rounding(granularity.min(128));
        let compared = index_scores_row(&found[range.clone()], &expected[range], rounding);
        // A mean is rounded.
        let is_inexact = case.exact && !case.mean && compared.error != 0.0;
        if compared.passed() && !is_inexact {
            return Ok(());
        }
        Err(format!("{at:?}: error {} beyond {}", compared.error, compared.limit))
    }
}

/// Runs a case twice, and once without scores of hidden blocks. Returns the number of compared
/// outputs.
pub fn run_index_scores(
    case: &ScoresCase,
    kernel: Choice,
    stream: &Stream,
) -> Result<usize, String> {
    let check = || -> Result<usize, String> {
        let (inputs, expected) = (ScoresInputs::upload(case, stream)?, Expected::new(case));
        let (sizes, blocks) = ([case.groups(), case.rows.rows()], inputs.blocks());
        let mut first: Option<Vec<u32>> = None;
        for hidden in [false, false, true] {
            let mut out = with_gap(stream, DType::F32, [sizes[0], sizes[1], blocks])?;
            inputs.run(kernel, hidden, &mut out, stream).map_err(text)?;
            wait(stream, &|| format!("{case:?}"))?;
            let bits = download(stream, &out)?;
            gaps_stay(&bits, blocks, poison(DType::F32))?;
            if !hidden && *first.get_or_insert_with(|| bits.clone()) != bits {
                return Err("another result at the second run".into());
            }
            check_all(&expected, &bits, blocks, hidden)?;
        }
        Ok(3)
    };
    check().map_err(|error| format!("{error}\n    {case:?}"))
}

fn check_all(expected: &Expected, bits: &[u32], blocks: usize, hidden: bool) -> Result<(), String> {
    let rows = expected.case.rows.rows();
    let all = bits.par_chunks_exact(blocks + super::GAP).enumerate();
    all.try_for_each(|(at, bits)| {
        let found: Vec<f32> = bits[..blocks].iter().map(|&bits| f32::from_bits(bits)).collect();
        expected.check([at / rows, at % rows], &found, hidden)
    })
}

/// Captures a call while sequences have one key, and replays it for other lengths.
pub fn scores_replay(case: &ScoresCase, kernel: Choice, stream: &Stream) -> Result<usize, String> {
    let mut case = case.clone();
    let most = case.rows.capacity as i32;
    let short = vec![1; case.rows.batch()];
    case.rows.lengths.clone_from(&short);
    let mut inputs = ScoresInputs::upload(&case, stream)?;
    let blocks = inputs.blocks();
    let mut out = with_gap(stream, DType::F32, [case.groups(), case.rows.rows(), blocks])?;
    let graph =
        stream.capture(|stream| inputs.run(kernel, false, &mut out, stream)).map_err(text)?;
    for step in 0..6 {
        let lengths =
            (0..case.rows.batch() as i32).map(|entry| (most / 5 * step + entry).min(most));
        case.rows.lengths = lengths.collect();
        let bits: Vec<u32> = case.rows.lengths.iter().map(|&x| x as u32).collect();
        refill(&mut inputs.lengths, stream, &bits)?;
        graph.launch(stream).map_err(text)?;
        wait(stream, &|| format!("{case:?}"))?;
        check_all(&Expected::new(&case), &download(stream, &out)?, blocks, false)?;
    }
    Ok(6)
}
