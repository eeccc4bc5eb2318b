//! Attention: dense batches or packed sequences, with or without a block mask, forward or backward.

use super::attention_operands::{AttentionData, AttentionOperands};
use super::attention_shape::{AttentionShape, Pass};
use super::backward_operands::BackwardOperands;
use super::block_lists::BlockLists;
use super::block_sparse::BlockSparse;
use super::id::{Fields, Id, with_name};
use super::lengths::Lengths;
use super::limits;
use super::mask_kind::MaskKind;
use super::operands::Operands;
use super::pairs::{PairKind, Pairs};
use super::peer::{PeerCase, PeerCaseError};
use super::shape::Shape;
use super::work::{TILE_ROWS, Work};
use crate::error::Result;
use blockflash_ops::{BlockMask, Mask, Stream, attention_flops};
use blockflash_sys::{DType, HeadDims};
use serde::Serialize;
use std::path::Path;

impl AttentionShape {
    /// The case as one of attention with a block mask; `None` without one.
    pub fn block_sparse(&self) -> Option<BlockSparse<'_>> {
        self.lists.map(|lists| BlockSparse { shape: self, lists })
    }

    /// Work of the forward pass of a dense batch under a mask inside of blocks, or with something
    /// that is added to scores. Keys and values are fetched as without it.
    fn pairs_work(&self) -> Work {
        let dense = Self { pairs: None, ..self.clone() }.dense_work();
        let Some(pairs) = self.pairs else { return dense };
        let mask = pairs.block_mask(self).ok().flatten();
        let seen = mask.and_then(|mask| mask.visited_pairs(Mask::Full).ok());
        let exps =
            seen.map_or(dense.exps, |seen| seen as f64 * (self.batch * self.num_heads_q) as f64);
        let part = if dense.exps == 0.0 { 1.0 } else { exps / dense.exps };
        Work {
            flops: 2.0 * exps * self.head_dims.sum() as f64,
            exps,
            bytes: dense.bytes + pairs.bytes(self),
            l2_bytes: dense.l2_bytes * part.min(1.0) + pairs.bytes(self),
        }
    }

    /// Work of the forward pass of a dense batch.
    fn dense_work(&self) -> Work {
        let Self { batch, seqlen_q, seqlen_kv, num_heads_q, num_heads_kv, head_dims, .. } = *self;
        let problem = self.problem();
        // Only a variable-length problem has no count.
        let flops = attention_flops(&problem).unwrap_or(0) as f64;
        let group = num_heads_q / num_heads_kv.max(1);
        let positions = (TILE_ROWS / group.max(1)).max(1);
        let tiles_of_heads = group.div_ceil(TILE_ROWS).max(1);
        // The last query of a tile sees the most keys.
        let keys = |tile: usize| {
            let last = ((tile + 1) * positions).min(seqlen_q) - 1;
            let first = last.min(tile * positions);
            let seen = |query: usize| problem.scores.mask.visible(query, seqlen_q, seqlen_kv);
            seen(last).end.saturating_sub(seen(first).start)
        };
        let keys: usize = (0..seqlen_q.div_ceil(positions)).map(keys).sum();
        let fetches = (batch * num_heads_kv * tiles_of_heads) as f64 * keys as f64;
        Work {
            flops,
            exps: flops / (2 * head_dims.sum()) as f64,
            bytes: self.bytes(),
            l2_bytes: fetches * self.pair_bytes() as f64 + self.query_bytes(),
        }
    }

    /// Operands of the forward pass.
    ///
    /// # Errors
    /// As [`Shape::operands`].
    pub(super) fn forward(&self, stream: &Stream, seed: u64) -> Result<AttentionOperands> {
        let mut data = AttentionData::random(&self.problem(), seed)?;
        let of_both = |lengths: &Lengths| [lengths.as_slice(); 2].map(<[_]>::to_vec);
        data.lengths = self.lengths.as_ref().map(of_both);
        // A backward pass reads the transpose.
        if let Some(sparse) = self.block_sparse() {
            data.block_mask = Some(sparse.block_mask(seed)?.with_transpose()?);
        }
        let mut scores = self.mask().into();
        if let Some(pairs) = self.pairs {
            pairs.add(self, seed, &mut scores)?;
            let mask = pairs.block_mask(self)?;
            data.block_mask = mask.map(BlockMask::with_transpose).transpose()?;
        }
        AttentionOperands::new(scores, data, false, stream)
    }
}

impl Fields for AttentionShape {
    const EMPTY: Self = Self {
        pass: Pass::Forward,
        batch: 0,
        seqlen_q: 0,
        seqlen_kv: 0,
        lengths: None,
        num_heads_q: 0,
        num_heads_kv: 0,
        head_dims: HeadDims::all(0),
        lists: None,
        pairs: None,
        mask: MaskKind::Full,
        dtype: DType::F16,
    };

    /// `b4_s4096_h32_d64_causal_bf16`, `b1_q1_kv8192_h32kv8_d128_full_f16`,
    /// `varlen4096+512x2_h16_d128_causal_bf16`,
    /// `b1_s16384_h16_d128_q128kv128_d0.25_uniform_full_bf16`. `d192v128` are head dimensions of
    /// q and k, and of v. After the heads, `m1` says that one
    /// of them has lists of its own. A backward pass begins with `bwd_`; [`Pairs`] stand before the
    /// mask.
    fn fields(&mut self, id: &mut Id<'_>) -> Option<()> {
        if id.has("bwd", self.pass == Pass::Backward) {
            id.word("bwd")?;
            self.pass = Pass::Backward;
        }
        if id.has("varlen", self.lengths.is_some()) {
            let mut lengths = self.lengths.take().unwrap_or(Lengths::NONE);
            id.field("varlen", &mut lengths)?;
            *self = self.packed(lengths);
        } else {
            id.field("b", &mut self.batch)?;
            id.seqlens(&mut self.seqlen_q, &mut self.seqlen_kv)?;
        }
        let all = self.num_heads_q;
        let mut heads = [all, self.num_heads_kv, self.lists.map_or(all, |lists| lists.mask_heads)];
        id.heads(&mut heads)?;
        let [q, kv, mask_heads] = heads;
        (self.num_heads_q, self.num_heads_kv) = (q, kv);
        id.field("d", &mut self.head_dims)?;
        if id.has("q", self.lists.is_some()) {
            let lists = self.lists.get_or_insert(BlockLists::EMPTY);
            lists.mask_heads = mask_heads;
            lists.fields(id)?;
        }
        if id.has_value(self.pairs.is_some(), |part| Pairs::parse(part).is_some()) {
            let mut pairs = self.pairs.unwrap_or(Pairs { kind: PairKind::Bias, block: 0 });
            id.part(&mut pairs, Pairs::to_string, Pairs::parse)?;
            self.pairs = Some(pairs);
        }
        id.part(&mut self.mask, MaskKind::to_string, |part| {
            MaskKind::try_from(part.to_owned()).ok()
        })?;
        // Codes are possible here only.
        id.part(&mut self.dtype, DType::to_string, |part| match part == DType::E4M3.name() {
            true => Some(DType::E4M3),
            false => with_name(part),
        })
    }
}

/// What there is of codes.
const FORWARD_OF_CODES: (DType, Pass, Option<Pairs>) = (DType::E4M3, Pass::Forward, None);

/// What competitors are told: only those of packed sequences know lengths, only dense ones another
/// head dimension of v.
#[derive(Serialize)]
struct ForPeers<'a> {
    #[serde(flatten)]
    shape: &'a AttentionShape,
    #[serde(skip_serializing_if = "Option::is_none")]
    head_dim_v: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    lengths: Option<&'a Lengths>,
}

impl Shape for AttentionShape {
    fn check(&self) -> Result<(), String> {
        if self.dtype.is_code() && (self.dtype, self.pass, self.pairs) != FORWARD_OF_CODES {
            return Err(format!("{}: the forward pass takes e4m3 and adds nothing", self.dtype));
        }
        let heads = [self.num_heads_q, self.num_heads_kv];
        let (batch, seqlens) = match &self.lengths {
            Some(_) if self.lists.is_some() => {
                return Err("packed sequences cannot have a block mask".to_owned());
            }
            Some(lengths) => (1, [lengths.tokens(); 2]),
            None => (self.batch, [self.seqlen_q, self.seqlen_kv]),
        };
        limits::attention(batch, seqlens, heads, self.head_dims)?;
        self.pairs.map_or(Ok(()), |pairs| pairs.check(self))?;
        self.block_sparse().map_or(Ok(()), |sparse| sparse.check())
    }

    fn op(&self) -> &'static str {
        match (self.lists, self.pairs, self.pass) {
            (None, None, Pass::Forward) => "attention_fwd",
            (None, None, Pass::Backward) => "attention_bwd",
            (None, Some(_), Pass::Forward) => "masks_fwd",
            (None, Some(_), Pass::Backward) => "masks_bwd",
            (Some(_), _, Pass::Forward) => "block_sparse_fwd",
            (Some(_), _, Pass::Backward) => "block_sparse_bwd",
        }
    }

    fn dtype(&self) -> DType {
        self.dtype
    }

    fn work(&self) -> Work {
        let forward = match (&self.lengths, self.block_sparse()) {
            (None, None) if self.pairs.is_some() => self.pairs_work(),
            // Every sequence for itself, and the offsets.
            (Some(lengths), _) => {
                let offsets = 4.0 * (lengths.batch() + 1) as f64;
                let start = Work { bytes: offsets, ..Work::default() };
                self.sequences().map(|one| one.dense_work()).fold(start, |sum, one| sum + one)
            }
            (None, Some(sparse)) => sparse.work(),
            (None, None) => self.dense_work(),
        };
        match self.pass {
            Pass::Forward => forward,
            // Five products in place of two, three of them of q and k. Exponentials are computed
            // anew, and a tile of keys shares each query and its gradient of o as one of queries
            // shares keys and values before. To q, k, v, o and lse come the gradients of the former
            // four, and rowsum(d_o∘o), as large as lse.
            Pass::Backward => {
                let HeadDims { qk, v } = self.head_dims;
                let products = (3 * qk + 2 * v) as f64 / self.head_dims.sum() as f64;
                Work { flops: products * forward.flops, bytes: 2.0 * forward.bytes, ..forward }
            }
        }
    }

    fn group(&self) -> String {
        let pairs = self.pairs.map_or(String::new(), |pairs| format!("{pairs}, "));
        let of_dense =
            |queries: &str| format!("head_dim {}, {pairs}{}{queries}", self.head_dims, self.mask);
        let group = match (self.block_sparse(), self.seqlen_q) {
            (Some(sparse), _) => sparse.group(),
            (None, _) if self.lengths.is_some() => of_dense(", variable length"),
            (None, q) if q == self.seqlen_kv => of_dense(""),
            (None, 1) => of_dense(", one query"),
            (None, q) => of_dense(&format!(", {q} queries")),
        };
        match self.pass {
            Pass::Forward => group,
            Pass::Backward => format!("{}, {group}", self.pass),
        }
    }

    fn peer_op(&self) -> &'static str {
        match (&self.lengths, self.pass) {
            _ if self.dtype.is_code() => "attention_e4m3",
            (Some(_), Pass::Forward) => "attention_packed",
            _ => self.op(),
        }
    }

    fn peer_case(&self, seed: u64, folder: &Path) -> Result<PeerCase, PeerCaseError> {
        if self.lengths.is_some() && (self.pass == Pass::Backward || self.dtype.is_code()) {
            return Err(PeerCaseError::DenseOnly);
        }
        if self.lists.is_some() && self.dtype.is_code() {
            return Err(PeerCaseError::OursOnly);
        }
        let head_dim_v = self.head_dims.single().is_none().then_some(self.head_dims.v);
        let is_dense = self.lengths.is_none() && self.lists.is_none() && self.pairs.is_none();
        if head_dim_v.is_some() && (!is_dense || self.dtype.is_code()) {
            return Err(PeerCaseError::OneHeadDim);
        }
        let for_peers = ForPeers { shape: self, head_dim_v, lengths: self.lengths.as_ref() };
        let case = PeerCase::new(self.peer_op(), &for_peers, seed)?;
        let Some(sparse) = self.block_sparse() else { return Ok(case) };
        // Both passes have the same lists. The protocol wants them for every query head.
        let stem = format!("{}_", Self { pass: Pass::Forward, ..self.clone() });
        case.with_pattern(folder, &stem, sparse.pattern_of_query_heads(seed))
    }

    fn operands(&self, stream: &Stream, seed: u64) -> Result<Box<dyn Operands>> {
        let forward = self.forward(stream, seed)?;
        Ok(match self.pass {
            Pass::Forward => Box::new(forward),
            Pass::Backward => Box::new(BackwardOperands::new(forward, stream, seed)?),
        })
    }
}

#[cfg(test)]
mod tests {
    use crate::case::Case;
    use serde_json::json;

    #[test]
    fn codes_have_a_forward_pass_alone() {
        let case: Case = "b2_s64_h4kv2_d32_causal_e4m3".parse().unwrap();
        let shape = case.attention().unwrap();
        assert_eq!(shape.problem().types.to_string(), "e4m3_e4m3_bf16");
        // Bytes of q, o and lse, and of k and v.
        assert_eq!(case.work().bytes, f64::from(512 * (32 + 64 + 4) + 256 * (32 + 32)));
        for id in [
            "bwd_b1_s64_h1_d32_full_e4m3",
            "b1_s64_h1_d32_alibi_full_e4m3",
            "b1_s64_h1_d32_full_e5m2",
            "b1_s64_h1_d32_full_i8",
        ] {
            assert!(id.parse::<Case>().is_err(), "{id}");
        }
    }

    #[test]
    fn competitors_get_the_shape_and_the_lists_of_the_forward_pass() {
        let folder = std::env::temp_dir();
        let peer_case = |id: &str| {
            let case: Case = id.parse().unwrap();
            serde_json::to_value(case.peer_case(3, &folder).unwrap()).unwrap()
        };
        for forward in ["b1_s8_h1_d8_full_bf16", "b1_s64_h2_d8_q32kv32_d0.5_uniform_full_bf16"] {
            let [mut forward, backward] =
                [peer_case(forward), peer_case(&format!("bwd_{forward}"))];
            let op = forward["op"].as_str().unwrap().replace("fwd", "bwd");
            forward["op"] = op.into();
            assert_eq!(backward, forward);
        }
        let packed = peer_case("varlen40+3x2_h4kv2_d16_window8_bf16");
        let of = ["op", "lengths", "mask", "num_heads_kv"].map(|name| packed[name].clone());
        let wanted = [json!("attention_packed"), json!([40, 3, 3]), json!("window8"), json!(2)];
        assert_eq!(of, wanted);
        let of_codes = peer_case("b1_s8_h1_d16_full_e4m3");
        assert_eq!([&of_codes["op"], &of_codes["dtype"]], ["attention_e4m3", "e4m3"]);
        for id in ["varlen8x2_h1_d16_full_e4m3", "b1_s64_h1_d16_q64kv64_d0.5_uniform_full_e4m3"] {
            assert!(id.parse::<Case>().unwrap().peer_case(3, &folder).is_err(), "{id}");
        }
        let backward: Case = "bwd_varlen40+3_h4_d16_full_bf16".parse().unwrap();
        assert_eq!(backward.peer_op(), "attention_bwd");
        assert!(backward.peer_case(3, &folder).unwrap_err().to_string().contains("dense batches"));
    }
}
