//! Safe launches: one per kernel, from the planner's parameters and the tensors. The pointers of the parameter struct come
//! from the tensors, and whatever decides which addresses the kernel touches is checked against them.

use crate::{DType, Error, LaunchConfig, Result, Row, Stream, View, ViewMut};
use blockflash_sys::manifest::{AttentionFwd, BsrMatmul, Variant};
use blockflash_sys::params::{blockflash_attention_fwd_params, blockflash_bsr_matmul_params};
use std::ffi::c_void;
use std::ptr;

/// Tensors of the attention forward kernels. With `cu_seqlens` the batch is packed into the first dimension.
#[derive(Debug)]
pub struct AttentionFwdOperands<'a> {
    /// `[batch, seqlen_q, num_heads_q, head_dim]`, packed `[total_q, num_heads_q, head_dim]`.
    pub q: View<'a>,
    /// `[batch, seqlen_kv, num_heads_kv, head_dim]`, packed `[total_kv, num_heads_kv, head_dim]`.
    pub k: View<'a>,
    /// As `k`.
    pub v: View<'a>,
    /// As `q`.
    pub o: ViewMut<'a>,
    /// f32 `[batch, num_heads_q, seqlen_q]`, packed `[num_heads_q, total_q]`.
    pub lse: Option<ViewMut<'a>>,
    /// f32 `[num_heads_q]`.
    pub sink: Option<View<'a>>,
    /// Packed only: i32 `[batch + 1]` offsets of the sequences in `q` and in `k`. The caller knows that they ascend from 0 to
    /// the number of packed rows and that no sequence is longer than the parameters say.
    pub cu_seqlens: Option<[View<'a>; 2]>,
}

/// Tensors of the BSR matmul kernels.
#[derive(Debug)]
pub struct BsrMatmulOperands<'a> {
    /// i32 `[ceil(m / block_size) + 1]`. The caller knows that it ascends from 0 to the number of blocks.
    pub row_ptr: View<'a>,
    /// i32 `[nnz_blocks]`. The caller knows that all are below `ceil(k / block_size)`.
    pub col_idx: View<'a>,
    /// `[nnz_blocks, block_size, block_size]`.
    pub values: View<'a>,
    /// i32 `[ceil(m / block_size)]`. The caller knows that it is a permutation.
    pub row_order: Option<View<'a>>,
    /// `[k, n]`.
    pub b: View<'a>,
    /// `[m, n]`.
    pub c: ViewMut<'a>,
    /// `[m]` or `[n]`.
    pub bias: Option<View<'a>>,
}

/// What does not fit; becomes [`Error::Launch`]. Formatting is left to the failure path.
pub(crate) type Fit = std::result::Result<(), String>;

/// Checks element type, shape and strides. Expected strides of dimensions of size 0 or 1 do not matter.
pub(crate) fn fits<const N: usize>(name: &str, view: &View<'_>, dtype: DType, dims: [(i64, i64); N]) -> Fit {
    let same = view.dtype() == dtype
        && view.shape().len() == N
        && dims.iter().zip(view.shape().iter().zip(view.strides())).all(
            |(&(size, stride), (&own, &step))| own as i64 == size && (own <= 1 || step as i64 == stride),
        );
    if same {
        return Ok(());
    }
    let (found, shape, strides) = (view.dtype(), view.shape(), view.strides());
    Err(format!(
        "{name} is {found} {shape:?} with strides {strides:?}, expected {dtype} (size, stride) {dims:?}"
    ))
}

pub(crate) fn require(condition: bool, what: &str) -> Fit {
    if condition { Ok(()) } else { Err(what.to_owned()) }
}

/// Checks the launch geometry: `blocks` in x, and what the row says about the rest.
fn fits_row(config: &LaunchConfig, row: &Row, blocks: i128) -> Fit {
    let [x, y, z] = config.grid;
    if i128::from(x) != blocks || y != 1 || z != 1 {
        return Err(format!("a grid of {x}x{y}x{z} blocks, expected {blocks}x1x1"));
    }
    require(config.block == row.threads(), "the number of threads is not that of the row")?;
    require(config.smem_bytes == row.smem_bytes(), "the shared memory is not that of the row")?;
    require(config.cluster.is_none(), "the kernel has no clusters")?;
    require(!config.programmatic_dependent_launch, "the kernel does not wait for its predecessor itself")
}

fn ceil_div(size: i64, tile: u32) -> i128 {
    (i128::from(size) + i128::from(tile) - 1) / i128::from(tile)
}

pub(crate) fn pointer(view: &View<'_>) -> *const c_void {
    // Device addresses are 64-bit on every platform that CUDA 13 supports.
    ptr::without_provenance(view.device_ptr().unwrap_or(0) as usize)
}

pub(crate) fn pointer_mut(view: &ViewMut<'_>) -> *mut c_void {
    pointer(&view.as_view()).cast_mut()
}

fn optional(view: Option<&View<'_>>) -> *const c_void {
    view.map_or(ptr::null(), pointer)
}

impl AttentionFwdOperands<'_> {
    fn fit(
        &self,
        row: &Row,
        tile: &AttentionFwd,
        config: &LaunchConfig,
        p: &blockflash_attention_fwd_params,
    ) -> Fit {
        let [batch, heads_q, heads_kv] = [p.batch, p.num_heads_q, p.num_heads_kv].map(i64::from);
        let [seqlen_q, seqlen_kv, head_dim] = [p.seqlen_q, p.seqlen_kv, p.head_dim].map(i64::from);
        let positive =
            [batch, heads_q, heads_kv, seqlen_q, head_dim].iter().all(|&size| size > 0) && seqlen_kv >= 0;
        require(positive, "a size is not positive")?;
        require(heads_q % heads_kv == 0, "num_heads_q is not a multiple of num_heads_kv")?;
        require(
            head_dim % 8 == 0 && head_dim <= i64::from(tile.head_dim),
            "the head dimension does not fit the tile",
        )?;
        let lse = self.lse.as_ref().map(ViewMut::as_view);
        let o = self.o.as_view();
        if let Some([cu_q, cu_kv]) = &self.cu_seqlens {
            fits("cu_seqlens_q", cu_q, DType::I32, [(batch + 1, 1)])?;
            fits("cu_seqlens_kv", cu_kv, DType::I32, [(batch + 1, 1)])?;
            let packed = |view: &View<'_>| view.shape().first().map_or(0, |&rows| rows as i64);
            let (total_q, total_kv) = (packed(&self.q), packed(&self.k));
            let rows = |total, seq, heads, head| [(total, seq), (heads, head), (head_dim, 1)];
            fits("q", &self.q, tile.dtype, rows(total_q, p.q_stride_seq, heads_q, p.q_stride_head))?;
            fits("k", &self.k, tile.dtype, rows(total_kv, p.k_stride_seq, heads_kv, p.k_stride_head))?;
            fits("v", &self.v, tile.dtype, rows(total_kv, p.v_stride_seq, heads_kv, p.v_stride_head))?;
            fits("o", &o, tile.dtype, rows(total_q, p.o_stride_seq, heads_q, p.o_stride_head))?;
            let dims = [(heads_q, p.lse_stride_head), (total_q, 1)];
            lse.map_or(Ok(()), |lse| fits("lse", &lse, DType::F32, dims))?;
            // The kernels add this one also when the batch is packed.
            require(p.lse_stride_batch == 0, "a packed lse has no batch stride")?;
        } else {
            let rows = |seqlen, heads, strides: [i64; 3]| {
                [(batch, strides[0]), (seqlen, strides[1]), (heads, strides[2]), (head_dim, 1)]
            };
            let q = rows(seqlen_q, heads_q, [p.q_stride_batch, p.q_stride_seq, p.q_stride_head]);
            let k = rows(seqlen_kv, heads_kv, [p.k_stride_batch, p.k_stride_seq, p.k_stride_head]);
            let v = rows(seqlen_kv, heads_kv, [p.v_stride_batch, p.v_stride_seq, p.v_stride_head]);
            let out = rows(seqlen_q, heads_q, [p.o_stride_batch, p.o_stride_seq, p.o_stride_head]);
            fits("q", &self.q, tile.dtype, q)?;
            fits("k", &self.k, tile.dtype, k)?;
            fits("v", &self.v, tile.dtype, v)?;
            fits("o", &o, tile.dtype, out)?;
            let dims = [(batch, p.lse_stride_batch), (heads_q, p.lse_stride_head), (seqlen_q, 1)];
            lse.map_or(Ok(()), |lse| fits("lse", &lse, DType::F32, dims))?;
        }
        self.sink.map_or(Ok(()), |sink| fits("sink", &sink, DType::F32, [(heads_q, 1)]))?;
        fits_row(config, row, ceil_div(seqlen_q, tile.block_q) * i128::from(heads_q) * i128::from(batch))
    }
}

impl BsrMatmulOperands<'_> {
    fn fit(
        &self,
        row: &Row,
        tile: &BsrMatmul,
        config: &LaunchConfig,
        p: &blockflash_bsr_matmul_params,
    ) -> Fit {
        require(p.m > 0 && p.n > 0 && p.k >= 0, "a size is not positive")?;
        let block = i64::from(tile.block_size);
        let block_rows = ceil_div(p.m, tile.block_size);
        let rows = i64::try_from(block_rows).map_err(|_| "m is too large".to_owned())?;
        let blocks = self.col_idx.shape().first().map_or(0, |&blocks| blocks as i64);
        fits("row_ptr", &self.row_ptr, DType::I32, [(rows + 1, 1)])?;
        fits("col_idx", &self.col_idx, DType::I32, [(blocks, 1)])?;
        fits("values", &self.values, tile.dtype, [(blocks, block * block), (block, block), (block, 1)])?;
        self.row_order.map_or(Ok(()), |order| fits("row_order", &order, DType::I32, [(rows, 1)]))?;
        fits("b", &self.b, tile.dtype, [(p.k, p.ldb), (p.n, 1)])?;
        let c = self.c.as_view();
        require(p.c_dtype == c.dtype() as i32 && c.dtype() != DType::I32, "c_dtype is not the type of c")?;
        fits("c", &c, c.dtype(), [(p.m, p.ldc), (p.n, 1)])?;
        let entries = if p.bias_per_row != 0 { p.m } else { p.n };
        self.bias.map_or(Ok(()), |bias| fits("bias", &bias, tile.dtype, [(entries, 1)]))?;
        fits_row(config, row, ceil_div(p.n, tile.block_n) * block_rows)
    }
}

impl Stream {
    /// Launches a kernel of [`Variant::AttentionFwd`]. The pointers in `params` are ignored: those of the operands are used.
    ///
    /// # Errors
    /// [`Error::Launch`] when row, geometry, parameters and operands do not fit each other; [`Error::NotOnGpu`],
    /// [`Error::DeviceMismatch`], [`Error::ParamSize`], [`Error::Image`], [`Error::Unsupported`], [`Error::Cuda`].
    pub fn launch_attention_fwd(
        &self,
        row: &Row,
        config: &LaunchConfig,
        params: &blockflash_attention_fwd_params,
        operands: AttentionFwdOperands<'_>,
    ) -> Result<()> {
        let failed = |what: String| Error::Launch { symbol: row.symbol(), what };
        let Variant::AttentionFwd(tile) = &row.variant else {
            return Err(failed("not a kernel of attention forward".to_owned()));
        };
        let lse = operands.lse.as_ref().map(ViewMut::as_view);
        let [cu_q, cu_kv] = operands.cu_seqlens.map_or([None, None], |both| both.map(Some));
        let views = [
            Some(operands.q),
            Some(operands.k),
            Some(operands.v),
            Some(operands.o.as_view()),
            lse,
            operands.sink,
            cu_q,
            cu_kv,
        ];
        self.expect_all(&views)?;
        operands.fit(row, tile, config, params).map_err(failed)?;
        let params = blockflash_attention_fwd_params {
            q: pointer(&operands.q),
            k: pointer(&operands.k),
            v: pointer(&operands.v),
            o: pointer_mut(&operands.o),
            lse: optional(lse.as_ref()).cast_mut().cast(),
            sink: optional(operands.sink.as_ref()).cast(),
            cu_seqlens_q: optional(cu_q.as_ref()).cast(),
            cu_seqlens_kv: optional(cu_kv.as_ref()).cast(),
            ..*params
        };
        // SAFETY:
        // 1. The row is a variant of attention forward, whose parameter struct this is.
        // 2. All pointers come from views of this device. The kernel's addresses follow from the sizes and strides in the
        //    struct and from the grid; `fit` found them to be those of the views, which reach no further than their memory.
        //    Where they follow from `cu_seqlens`, their contents are the promise of whoever built them.
        // 3. `o` and `lse` are borrowed exclusively.
        unsafe { self.launch_with(row, config, &params, views.iter().flatten().filter_map(View::owner)) }
    }

    /// Launches a kernel of [`Variant::BsrMatmul`]. The pointers in `params` are ignored: those of the operands are used.
    ///
    /// # Errors
    /// As [`launch_attention_fwd`](Stream::launch_attention_fwd).
    pub fn launch_bsr_matmul(
        &self,
        row: &Row,
        config: &LaunchConfig,
        params: &blockflash_bsr_matmul_params,
        operands: BsrMatmulOperands<'_>,
    ) -> Result<()> {
        let failed = |what: String| Error::Launch { symbol: row.symbol(), what };
        let Variant::BsrMatmul(tile) = &row.variant else {
            return Err(failed("not a kernel of BSR matmul".to_owned()));
        };
        let views = [
            Some(operands.row_ptr),
            Some(operands.col_idx),
            Some(operands.values),
            operands.row_order,
            Some(operands.b),
            Some(operands.c.as_view()),
            operands.bias,
        ];
        self.expect_all(&views)?;
        operands.fit(row, tile, config, params).map_err(failed)?;
        let params = blockflash_bsr_matmul_params {
            row_ptr: pointer(&operands.row_ptr).cast(),
            col_idx: pointer(&operands.col_idx).cast(),
            values: pointer(&operands.values),
            row_order: optional(operands.row_order.as_ref()).cast(),
            b: pointer(&operands.b),
            c: pointer_mut(&operands.c),
            bias: optional(operands.bias.as_ref()),
            ..*params
        };
        // SAFETY:
        // 1. The row is a variant of BSR matmul, whose parameter struct this is.
        // 2. As in `launch_attention_fwd`; the contents of `row_ptr`, `col_idx` and `row_order` are the promise of whoever
        //    built them.
        // 3. `c` is borrowed exclusively.
        unsafe { self.launch_with(row, config, &params, views.iter().flatten().filter_map(View::owner)) }
    }

    pub(crate) fn expect_all(&self, views: &[Option<View<'_>>]) -> Result<()> {
        if self.device().is_cpu() {
            return Err(Error::NotOnGpu { what: "launching a kernel" });
        }
        views.iter().flatten().try_for_each(|view| self.device().expect(view.device()))
    }
}
