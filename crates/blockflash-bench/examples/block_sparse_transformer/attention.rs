//! Causal self-attention: everything but its four projections is one call of the library forward
//! and one backward.

use super::host::Place;
use super::layer::Layer;
use super::model::Sizes;
use super::sparsity::Sparsity;
use blockflash_bench::Result;
use blockflash_ops::{
    Activation, Align, Attention, AttentionBackward, AttentionGradientsMut, BlockGeometry,
    BlockMask, BsrMatmul, DType, Mask, Stream, Tensor, View, ViewMut,
};

/// Which of the earlier tokens are attended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Pattern {
    /// All of them.
    Dense,
    /// Those in the same block of so many tokens, in the `local` blocks before it, and in every
    /// `stride`-th of all earlier blocks.
    Blocks { block: usize, local: usize, stride: usize },
}

impl Pattern {
    /// The block mask, with the transpose that the backward pass needs; `None` if there is none.
    ///
    /// # Errors
    /// A block or a stride of 0, or a device that fails.
    pub fn mask(&self, seqlen: usize, stream: &Stream) -> Result<Option<BlockMask>> {
        let Self::Blocks { block, local, stride } = *self else { return Ok(None) };
        let geometry = BlockGeometry::new(seqlen, seqlen, block, block)?;
        let mask = BlockMask::strided(geometry, stride, local, Align::BottomRight)?;
        let mask = mask.intersect_mask(Mask::causal())?.with_transpose()?;
        Ok(Some(mask.to(stream)?))
    }
}

/// The call, which forward and backward pass share.
pub fn call<'a>([q, k, v]: [View<'a>; 3], block_mask: Option<&'a BlockMask>) -> Attention<'a> {
    Attention { mask: Mask::causal(), block_mask, ..Attention::new(q, k, v) }
}

/// Weights, and what the backward pass needs of the forward pass.
pub struct SelfAttention {
    block_mask: Option<BlockMask>,
    /// Of queries, keys, values, and from the heads to the output.
    projections: [Layer; 4],
    /// `[batch, seqlen, heads, head_dim]`, like o and the gradients.
    qkv: [Tensor; 3],
    o: Tensor,
    /// f32 `[batch, heads, seqlen]`
    lse: Tensor,
    d_qkv: [Tensor; 3],
    d_o: Tensor,
    workspace: Option<Tensor>,
}

/// `[batch, seqlen, heads, head_dim]` as `[tokens, features]`.
fn rows(tensor: &Tensor) -> Result<View<'_>> {
    Ok(tensor.view().flatten(2..4)?.flatten(0..2)?)
}

/// The same for writing, transposed: the shape of C in a product with weights.
fn columns(tensor: &mut Tensor) -> Result<ViewMut<'_>> {
    Ok(tensor.view_mut().flatten(2..4)?.flatten(0..2)?.permute(&[1, 0])?)
}

impl SelfAttention {
    /// Draws weights for windows `[batch, seqlen]`.
    ///
    /// # Errors
    /// Invalid sizes, too little memory, or a device that has no such kernels or fails.
    pub fn new(
        sizes: &Sizes,
        [batch, seqlen]: [usize; 2],
        seed: u64,
        place: &Place,
    ) -> Result<Self> {
        let Place { stream, dtype } = place;
        let (heads, features) = (sizes.heads, sizes.features());
        let all = Sparsity::draw([features; 2], sizes.block, 1.0, 0)?;
        let layer = |lane: u64| Layer::new(&all, 1.0, seed ^ lane << 32, *dtype, stream);
        let tensor = || place.empty(*dtype, &[batch, seqlen, heads, sizes.head_dim]);
        let mut attention = Self {
            block_mask: sizes.pattern.mask(seqlen, stream)?,
            projections: [layer(1)?, layer(2)?, layer(3)?, layer(4)?],
            qkv: [tensor()?, tensor()?, tensor()?],
            o: tensor()?,
            lse: place.empty(DType::F32, &[batch, heads, seqlen])?,
            d_qkv: [tensor()?, tensor()?, tensor()?],
            d_o: tensor()?,
            workspace: None,
        };
        let bytes = attention.call_backward().workspace_bytes(stream.device())?;
        attention.workspace = (bytes > 0).then(|| place.empty(DType::U8, &[bytes])).transpose()?;
        Ok(attention)
    }

    fn call_backward(&self) -> AttentionBackward<'_> {
        let Self { block_mask, qkv, o, lse, d_o, .. } = self;
        let attention = call(qkv.each_ref().map(Tensor::view), block_mask.as_ref());
        AttentionBackward { attention, o: o.view(), lse: lse.view(), d_o: d_o.view() }
    }

    /// Writes the output to y, f32 `[tokens, features]`, for x `[tokens, features]`.
    ///
    /// # Errors
    /// A device that has no such kernels or fails; the same for the next function.
    pub fn forward(&mut self, x: View<'_>, y: ViewMut<'_>, stream: &Stream) -> Result<()> {
        let Self { block_mask, projections: [of_qkv @ .., out], qkv, o, lse, .. } = self;
        for (layer, tensor) in of_qkv.iter().zip(&mut *qkv) {
            layer.forward(x, Activation::None)?.matmul_into(columns(tensor)?, stream)?;
        }
        let attention = call(qkv.each_ref().map(Tensor::view), block_mask.as_ref());
        attention.forward_into(o.view_mut(), Some(lse.view_mut()), stream)?;
        let product = out.forward(rows(o)?, Activation::None)?;
        Ok(product.matmul_into(y.permute(&[1, 0])?, stream)?)
    }

    /// Writes the gradient of x to dx, f32 `[tokens, features]`, given x and the gradient of y. The
    /// gradients of the weights stay in the layers.
    pub fn backward(
        &mut self,
        x: View<'_>,
        dy: View<'_>,
        dx: ViewMut<'_>,
        stream: &Stream,
    ) -> Result<()> {
        let Self { projections: [of_qkv @ .., out], o, d_o, .. } = self;
        out.find_gradient(dy, rows(o)?, stream)?;
        out.backward(dy)?.matmul_into(columns(d_o)?, stream)?;

        let Self { block_mask, qkv, o, lse, d_qkv, d_o, workspace, .. } = self;
        let attention = call(qkv.each_ref().map(Tensor::view), block_mask.as_ref());
        let [dq, dk, dv] = d_qkv.each_mut().map(Tensor::view_mut);
        let gradients = AttentionGradientsMut { dq, dk, dv, d_sink: None };
        AttentionBackward { attention, o: o.view(), lse: lse.view(), d_o: d_o.view() }
            .backward_into(gradients, workspace.as_mut().map(Tensor::view_mut), stream)?;

        let mut dx = dx.permute(&[1, 0])?;
        for (at, (layer, gradient)) in of_qkv.iter_mut().zip(&*d_qkv).enumerate() {
            layer.find_gradient(rows(gradient)?, x, stream)?;
            // The second and the third add to the first.
            let beta = if at == 0 { 0.0 } else { 1.0 };
            let product = BsrMatmul { beta, ..layer.backward(rows(gradient)?)? };
            product.matmul_into(dx.reborrow(), stream)?;
        }
        Ok(())
    }

    /// All layers with their names.
    pub fn layers(&mut self) -> impl Iterator<Item = (&'static str, &mut Layer)> {
        ["queries", "keys", "values", "heads"].into_iter().zip(&mut self.projections)
    }
}
