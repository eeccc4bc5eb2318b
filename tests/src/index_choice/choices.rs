//! Runs choices on a device and checks every entry.

use super::{Keys, TopKCase, gaps_stay, ints, text, with_gap};
use crate::attention::Choice;
use crate::gpu::wait;
use crate::host::{download, refill};
use crate::number::poison;
use blockflash_ops::{
    AttentionDecodeWorkspace, DType, Error, Operation, PackedTokens, Stream, Tensor, TopK,
};
use blockflash_oracle::largest_columns;

/// The operands of a case on a device.
struct TopKInputs {
    case: TopKCase,
    scores: Tensor,
    lengths: Tensor,
    offsets_q: Tensor,
    offsets_kv: Tensor,
    workspace: Option<AttentionDecodeWorkspace>,
}

impl TopKInputs {
    fn upload(case: &TopKCase, scores: &[f32], stream: &Stream) -> Result<Self, String> {
        let (rows, batch) = (&case.rows, case.rows.batch());
        let (is_packed, blocks) = (rows.keys == Keys::Packed, rows.blocks());
        let lengths = if is_packed { vec![0; batch] } else { rows.lengths.clone() };
        let offsets_kv = if is_packed { rows.offsets_kv() } else { vec![0; batch + 1] };
        // With NaN behind each row.
        let mut spread = vec![f32::NAN; case.groups * rows.rows() * (blocks + super::GAP)];
        let targets = spread.chunks_exact_mut(blocks + super::GAP);
        targets.zip(scores.chunks_exact(blocks)).for_each(|(to, from)| {
            to[..blocks].copy_from_slice(from);
        });
        let shape = [case.groups, rows.rows(), blocks + super::GAP];
        let mut inputs = Self {
            scores: Tensor::from_slice(stream, &spread, &shape).map_err(text)?,
            lengths: ints(stream, &lengths, &[batch])?,
            offsets_q: ints(stream, &rows.offsets_q(), &[batch + 1])?,
            offsets_kv: ints(stream, &offsets_kv, &[batch + 1])?,
            workspace: None,
            case: case.clone(),
        };
        let bytes = inputs.call().and_then(|call| call.workspace_bytes(case.k, stream.device()));
        let workspace = AttentionDecodeWorkspace::new(stream, bytes.map_err(text)?);
        inputs.workspace = Some(workspace.map_err(text)?);
        Ok(inputs)
    }

    fn call(&self) -> Result<TopK<'_>, Error> {
        let (case, rows) = (&self.case, &self.case.rows);
        let is_packed = rows.keys == Keys::Packed;
        let packed = |offsets, max_seqlen| PackedTokens { cu_seqlens: offsets, max_seqlen };
        let scores = self.scores.view().slice(2, 0..rows.blocks())?;
        Ok(TopK {
            batch: rows.batch(),
            packed: rows.packed.then(|| packed(self.offsets_q.view(), rows.max_seqlen_q())),
            capacity: rows.capacity,
            packed_kv: is_packed.then(|| packed(self.offsets_kv.view(), rows.capacity)),
            seqused_kv: (rows.given && !is_packed).then(|| self.lengths.view()),
            mask: rows.mask(),
            first: case.forced[0],
            last: case.forced[1],
            workspace: self.workspace.as_ref(),
            ..TopK::new(scores, rows.granularity)
        })
    }

    fn run(&self, kernel: Choice, out: &mut Tensor, stream: &Stream) -> Result<(), Error> {
        let out = out.view_mut().slice(2, 0..self.case.k)?;
        match kernel {
            Choice::Selected => self.call()?.run(out, stream),
            Choice::This(kernel) => self.call()?.run_with(kernel, out, stream),
        }
    }
}

/// Checks all lists, `[groups, rows, k + GAP]`.
fn check(case: &TopKCase, scores: &[f32], bits: &[u32]) -> Result<(), String> {
    let (rows, blocks) = (case.rows.visible(), case.rows.blocks());
    gaps_stay(bits, case.k, poison(DType::I32))?;
    for (at, bits) in bits.chunks_exact(case.k + super::GAP).enumerate() {
        let columns = case.rows.blocks_of(&rows[at % rows.len()].1);
        let scores = &scores[at * blocks..][..blocks];
        let expected = largest_columns(scores, columns.clone(), case.forced, case.k);
        let found: Vec<i32> = bits[..case.k].iter().map(|&bits| bits as i32).collect();
        if let Some(place) = (0..case.k).find(|&place| found[place] != expected[place]) {
            let (found, expected) = (found[place], expected[place]);
            return Err(format!("{at}: entry {place} is {found}, not {expected} of {columns:?}"));
        }
    }
    Ok(())
}

/// Runs a case twice and returns the number of compared outputs.
pub fn run_top_k(case: &TopKCase, kernel: Choice, stream: &Stream) -> Result<usize, String> {
    let run = || -> Result<usize, String> {
        let scores = case.scores();
        let inputs = TopKInputs::upload(case, &scores, stream)?;
        for _ in 0..2 {
            let mut out = with_gap(stream, DType::I32, [case.groups, case.rows.rows(), case.k])?;
            inputs.run(kernel, &mut out, stream).map_err(text)?;
            wait(stream, &|| format!("{case:?}"))?;
            check(case, &scores, &download(stream, &out)?)?;
        }
        Ok(2)
    };
    run().map_err(|error| format!("{error}\n    {case:?}"))
}

/// Captures a call while sequences have one key, and replays it for other lengths.
pub fn choice_replays(case: &TopKCase, kernel: Choice, stream: &Stream) -> Result<usize, String> {
    let mut case = case.clone();
    let most = case.rows.capacity as i32;
    let targets = vec![most; case.rows.batch()];
    // All scores, of which each replay sees some.
    case.rows.lengths.clone_from(&targets);
    let scores = case.scores();
    case.rows.lengths.fill(1);
    let mut inputs = TopKInputs::upload(&case, &scores, stream)?;
    let mut out = with_gap(stream, DType::I32, [case.groups, case.rows.rows(), case.k])?;
    let graph = stream.capture(|stream| inputs.run(kernel, &mut out, stream)).map_err(text)?;
    for step in 0..8 {
        let lengths =
            (0..case.rows.batch() as i32).map(|entry| (most / 7 * step + entry).min(most));
        case.rows.lengths = lengths.collect();
        let bits: Vec<u32> = case.rows.lengths.iter().map(|&x| x as u32).collect();
        refill(&mut inputs.lengths, stream, &bits)?;
        graph.launch(stream).map_err(text)?;
        wait(stream, &|| format!("{case:?}"))?;
        check(&case, &scores, &download(stream, &out)?)?;
    }
    Ok(8)
}
