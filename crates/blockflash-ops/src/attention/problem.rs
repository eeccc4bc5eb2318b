use super::seqlens::check_maximum;
use super::{
    Attention, BlockMaskSizes, CuSeqlens, MAX_SEQLEN, Mask, OperandScalesProblem, ScoresProblem,
};
use crate::check::{Operand, to_i32};
use crate::kv_cache::{FLOATS, TYPES};
use crate::{Error, Result};
use blockflash_safe::ViewMut;
use blockflash_sys::{DType, ElementTypes, HeadDims};

/// Element strides of a `[batch, seqlen, num_heads, head_dim]` tensor; `head_dim` is contiguous.
/// `batch` is 0 for packed (variable-length) tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Strides {
    /// Between batch entries.
    pub batch: usize,
    /// Between rows of a sequence.
    pub seq: usize,
    /// Between heads.
    pub head: usize,
}

impl Strides {
    /// Those of a tensor without gaps.
    pub(crate) const fn contiguous(seqlen: usize, heads: usize, head_dim: usize) -> Self {
        let seq = heads.saturating_mul(head_dim);
        Self { batch: seqlen.saturating_mul(seq), seq, head: head_dim }
    }
}

/// Element strides of an lse tensor; rows of a sequence are contiguous. `batch` is 0 for packed
/// (variable-length) tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LseStrides {
    /// Between batch entries.
    pub batch: usize,
    /// Between heads.
    pub head: usize,
}

/// Rows of the packed tensors of a variable-length batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedRows {
    /// Rows of q and o.
    pub total_q: usize,
    /// Rows of k and v.
    pub total_kv: usize,
}

/// An attention call reduced to plain numbers: what `select` and
/// `plan` work on.
///
/// [`Attention::problem`] makes one from tensors, with all checks; [`AttentionProblem::dense`]
/// makes one without tensors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionProblem {
    /// Element types of q, of k and v, and of o.
    pub types: ElementTypes,
    /// Batch entries.
    pub batch: usize,
    /// Queries per batch entry; the longest one when variable-length.
    pub seqlen_q: usize,
    /// Keys per batch entry; the longest one when variable-length.
    pub seqlen_kv: usize,
    /// Heads of q and o, a multiple of `num_heads_kv`.
    pub num_heads_q: usize,
    /// Heads of k and v.
    pub num_heads_kv: usize,
    /// Elements of a row of q and k, and of v and o.
    pub head_dims: HeadDims,
    /// Set when the batch is variable-length.
    pub packed: Option<PackedRows>,
    /// Strides of q.
    pub q: Strides,
    /// Strides of k.
    pub k: Strides,
    /// Strides of v.
    pub v: Strides,
    /// Strides of o.
    pub o: Strides,
    /// Strides of lse; `None` when the call does not ask for it.
    pub lse: Option<LseStrides>,
    /// What happens to a score.
    pub scores: ScoresProblem,
    /// Set when attention is block-sparse.
    pub block_mask: Option<BlockMaskSizes>,
    /// Which scales codes of 8 bits have.
    pub scales: OperandScalesProblem,
}

impl AttentionProblem {
    /// A full, contiguous problem with the default scale, one element type and one head dimension:
    /// the start of a plan without tensors. Not checked.
    pub fn dense(dtype: DType, sizes: [usize; 3], heads: [usize; 2], head_dim: usize) -> Self {
        Self::contiguous(ElementTypes::all(dtype), sizes, heads, HeadDims::all(head_dim))
    }

    /// [`dense`](Self::dense) of any element types and head dimensions.
    pub fn contiguous(
        types: ElementTypes,
        [batch, seqlen_q, seqlen_kv]: [usize; 3],
        [num_heads_q, num_heads_kv]: [usize; 2],
        head_dims: HeadDims,
    ) -> Self {
        let of_q = |head_dim| Strides::contiguous(seqlen_q, num_heads_q, head_dim);
        let of_kv = |head_dim| Strides::contiguous(seqlen_kv, num_heads_kv, head_dim);
        Self {
            types,
            batch,
            seqlen_q,
            seqlen_kv,
            num_heads_q,
            num_heads_kv,
            head_dims,
            packed: None,
            q: of_q(head_dims.qk),
            k: of_kv(head_dims.qk),
            v: of_kv(head_dims.v),
            o: of_q(head_dims.v),
            lse: None,
            scores: ScoresProblem::of(head_dims.qk),
            block_mask: None,
            scales: OperandScalesProblem::default(),
        }
    }

    /// What a kernel with score terms is for: the name of the first of them that the problem has.
    pub fn terms(&self) -> Option<&'static str> {
        let partial = self.block_mask.is_some_and(|mask| mask.bits);
        self.scores.added().or(partial.then_some("a block mask with partial blocks"))
    }

    /// Whether there is no output element to compute.
    pub fn is_empty(&self) -> bool {
        let rows = self.packed.map_or(self.seqlen_q, |packed| packed.total_q.min(self.seqlen_q));
        self.batch == 0 || self.num_heads_q == 0 || rows == 0
    }

    /// Shape of q.
    pub fn q_shape(&self) -> Vec<usize> {
        self.rows_of_q(self.head_dims.qk)
    }

    /// Shape of k.
    pub fn k_shape(&self) -> Vec<usize> {
        self.rows_of_kv(self.head_dims.qk)
    }

    /// Shape of v.
    pub fn v_shape(&self) -> Vec<usize> {
        self.rows_of_kv(self.head_dims.v)
    }

    /// Shape of o.
    pub fn o_shape(&self) -> Vec<usize> {
        self.rows_of_q(self.head_dims.v)
    }

    fn rows_of_q(&self, head_dim: usize) -> Vec<usize> {
        match self.packed {
            Some(packed) => vec![packed.total_q, self.num_heads_q, head_dim],
            None => vec![self.batch, self.seqlen_q, self.num_heads_q, head_dim],
        }
    }

    fn rows_of_kv(&self, head_dim: usize) -> Vec<usize> {
        match self.packed {
            Some(packed) => vec![packed.total_kv, self.num_heads_kv, head_dim],
            None => vec![self.batch, self.seqlen_kv, self.num_heads_kv, head_dim],
        }
    }

    /// Shape of lse.
    pub fn lse_shape(&self) -> Vec<usize> {
        match self.packed {
            Some(packed) => vec![self.num_heads_q, packed.total_q],
            None => vec![self.batch, self.num_heads_q, self.seqlen_q],
        }
    }

    /// The same problem under a mask.
    pub fn with_mask(self, mask: Mask) -> Self {
        Self { scores: ScoresProblem { mask, ..self.scores }, ..self }
    }

    /// The same problem, asking for a contiguous `lse` too.
    pub fn with_lse(self) -> Self {
        let (batch, head) = match self.packed {
            Some(packed) => (0, packed.total_q),
            None => (self.num_heads_q.saturating_mul(self.seqlen_q), self.seqlen_q),
        };
        Self { lse: Some(LseStrides { batch, head }), ..self }
    }

    /// The same problem with these outputs, which are checked.
    pub fn with_outputs(self, o: &ViewMut<'_>, lse: Option<&ViewMut<'_>>) -> Result<Self> {
        let o = row_strides(&Operand::of_mut("o", o), self.types.o, &self.o_shape())?;
        let lse = lse.map(|lse| self.lse_strides(&Operand::of_mut("lse", lse))).transpose()?;
        Ok(Self { o, lse, ..self })
    }

    /// The strides of a log-sum-exp, after checks of its type, shape and layout.
    pub(crate) fn lse_strides(&self, lse: &Operand<'_>) -> Result<LseStrides> {
        lse.dtype_in(&[DType::F32])?;
        lse.shape_is(&self.lse_shape())?;
        lse.last_dim_contiguous()?;
        Ok(match *lse.strides {
            [batch, head, _] => LseStrides { batch, head },
            [head, ..] => LseStrides { batch: 0, head },
            [] => LseStrides { batch: 0, head: 0 },
        })
    }
}

/// The strides of a tensor of rows, after checks of its type, shape and layout.
pub(crate) fn row_strides(operand: &Operand<'_>, dtype: DType, shape: &[usize]) -> Result<Strides> {
    operand.dtype_in(&[dtype])?;
    operand.shape_is(shape)?;
    operand.last_dim_contiguous()?;
    Ok(strides(operand.strides))
}

impl Attention<'_> {
    /// Everything that can be checked without reading a tensor, and the result as plain numbers:
    /// for a contiguous `o` and no `lse`, until `AttentionProblem::with_outputs` says otherwise.
    ///
    /// Whether a kernel exists is another question, which `select` answers; the
    /// CPU runs every problem.
    pub fn problem(&self) -> Result<AttentionProblem> {
        let (q, k, v) =
            (Operand::new("q", &self.q), Operand::new("k", &self.k), Operand::new("v", &self.v));
        q.dtype_in(&TYPES)?;
        k.dtype_in(&[q.dtype])?;
        v.dtype_in(&[q.dtype])?;

        let mut problem = match &self.cu_seqlens {
            None => dense_sizes(&q, &k, &v)?,
            Some(cu_seqlens) => packed_sizes(cu_seqlens, &q, &k, &v)?,
        };
        for operand in [q, k, v] {
            operand.last_dim_contiguous()?;
        }
        (problem.q, problem.k, problem.v) =
            (strides(q.strides), strides(k.strides), strides(v.strides));

        let (num_heads_q, num_heads_kv) = (problem.num_heads_q, problem.num_heads_kv);
        if num_heads_q > 0 && (num_heads_kv == 0 || num_heads_q % num_heads_kv != 0) {
            return Err(Error::HeadGroups { num_heads_q, num_heads_kv });
        }
        for (what, size) in
            [("batch", problem.batch), ("num_heads_q", num_heads_q), ("num_heads_kv", num_heads_kv)]
        {
            to_i32(what, size)?;
        }
        for (what, value) in [("seqlen_q", problem.seqlen_q), ("seqlen_kv", problem.seqlen_kv)] {
            if value > MAX_SEQLEN {
                return Err(Error::TooLarge { what, value, limit: MAX_SEQLEN });
            }
        }

        problem.types.o = self.output_type(q.dtype)?;
        problem.scales = self.scales.problem(&problem)?;
        problem.scores = self.scores.problem(&problem)?;
        if let Some(block_mask) = self.block_mask {
            let sizes = [problem.batch, problem.seqlen_q, problem.seqlen_kv];
            let (heads, packed) = ([num_heads_q, num_heads_kv], problem.packed.is_some());
            problem.block_mask = Some(BlockMaskSizes::of(block_mask, sizes, heads, packed)?);
        }
        Ok(problem)
    }

    /// The element type of the output, for queries of this type.
    fn output_type(&self, of_q: DType) -> Result<DType> {
        match self.o_dtype {
            None if of_q.is_code() => Ok(DType::BF16),
            None => Ok(of_q),
            Some(found) if FLOATS.contains(&found) => Ok(found),
            Some(found) => {
                Err(Error::DType { what: "o_dtype", expected: "f16 or bf16 or f32".into(), found })
            }
        }
    }
}

fn dense_sizes(q: &Operand<'_>, k: &Operand<'_>, v: &Operand<'_>) -> Result<AttentionProblem> {
    let &[batch, seqlen_q, num_heads_q, qk] = q.shape else {
        return Err(q.wrong_shape("[batch, seqlen_q, num_heads_q, head_dim]"));
    };
    let &[_, seqlen_kv, num_heads_kv, _] = k.shape else {
        return Err(k.wrong_shape("[batch, seqlen_kv, num_heads_kv, head_dim]"));
    };
    if qk == 0 {
        return Err(q.wrong_shape("a head_dim of at least 1"));
    }
    k.shape_is(&[batch, seqlen_kv, num_heads_kv, qk])?;
    let types = ElementTypes::all(q.dtype);
    let sizes = [batch, seqlen_q, seqlen_kv];
    let head_dims = HeadDims { qk, v: width_like(v, k)? };
    Ok(AttentionProblem::contiguous(types, sizes, [num_heads_q, num_heads_kv], head_dims))
}

fn packed_sizes(
    cu_seqlens: &CuSeqlens<'_>,
    q: &Operand<'_>,
    k: &Operand<'_>,
    v: &Operand<'_>,
) -> Result<AttentionProblem> {
    let &[total_q, num_heads_q, qk] = q.shape else {
        return Err(q.wrong_shape("[total_q, num_heads_q, head_dim] (variable length)"));
    };
    let &[total_kv, num_heads_kv, _] = k.shape else {
        return Err(k.wrong_shape("[total_kv, num_heads_kv, head_dim] (variable length)"));
    };
    if qk == 0 {
        return Err(q.wrong_shape("a head_dim of at least 1"));
    }
    k.shape_is(&[total_kv, num_heads_kv, qk])?;
    let head_dims = HeadDims { qk, v: width_like(v, k)? };
    // Offsets into the packed rows are 32-bit.
    to_i32("total_q", total_q)?;
    to_i32("total_kv", total_kv)?;

    let batch = cu_seqlens.batch()?;
    let sizes = [batch, cu_seqlens.max_seqlen_q, cu_seqlens.max_seqlen_kv];
    check_maximum("max_seqlen_q", [batch, sizes[1]], total_q)?;
    check_maximum("max_seqlen_kv", [batch, sizes[2]], total_kv)?;
    let (types, heads) = (ElementTypes::all(q.dtype), [num_heads_q, num_heads_kv]);
    let dense = AttentionProblem::contiguous(types, sizes, heads, head_dims);
    Ok(AttentionProblem {
        packed: Some(PackedRows { total_q, total_kv }),
        o: Strides { batch: 0, ..dense.o },
        ..dense
    })
}

/// The last size of values, whose others are those of the keys.
pub(crate) fn width_like(v: &Operand<'_>, k: &Operand<'_>) -> Result<usize> {
    if let ([of_v @ .., width], [of_k @ .., _]) = (v.shape, k.shape)
        && *width > 0
        && of_v.iter().eq(of_k)
    {
        return Ok(*width);
    }
    let mut expected = k.shape.to_vec();
    if let (Some(last), Some(&width)) = (expected.last_mut(), v.shape.last()) {
        *last = width.max(1);
    }
    Err(v.wrong_shape(format!("{expected:?}")))
}

fn strides(strides: &[usize]) -> Strides {
    match *strides {
        [batch, seq, head, _] => Strides { batch, seq, head },
        [seq, head, _] => Strides { batch: 0, seq, head },
        _ => Strides { batch: 0, seq: 0, head: 0 },
    }
}

#[cfg(test)]
#[path = "problem_tests.rs"]
mod tests;
