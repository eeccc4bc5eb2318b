use crate::{DistributedBlockMask, Scheme, Shard};
use blockflash_ops::Attention;

/// Attention over a sequence whose rows are held by several ranks, as a [`Shard`] says. Queries and
/// keys have the same positions.
///
/// Every rank makes the same call at the same time, with its own rows. The results are those of
/// one device but for rounding, and the same bits at every call.
///
/// A packed batch of three sequences:
///
/// ```
/// # use blockflash_dist::{Communicator, DistributedAttention, Memory, Scheme, Shard};
/// # use blockflash_ops::{Attention, DType, Device, Mask, Tensor};
/// # let stream = Device::cpu().stream()?;
/// # let comm = Memory::group(&Device::cpu(), 1, std::time::Duration::ZERO)?.remove(0);
/// # let scheme = Scheme { heads: 1, keys: 1 };
/// let cu_seqlens = [0, 12, 40, 50];
/// let shard = Shard::new(50, comm.world(), comm.rank())?;
/// let x = Tensor::zeros(&stream, DType::F32, &[1, shard.rows(), 4, 8])?;
/// let scores = Mask::causal().into();
/// let attention = Attention { scores, ..Attention::new(x.view(), x.view(), x.view()) };
/// let cu_seqlens = Some(&cu_seqlens[..]);
/// let call = DistributedAttention { attention, shard, scheme, block_mask: None, cu_seqlens };
/// // Once for the batch, in all layers of a model.
/// let prepared = call.prepare(&comm)?;
/// let output = call.forward_prepared(&prepared, &comm, &stream)?;
/// # Ok::<(), blockflash_dist::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct DistributedAttention<'a> {
    /// The call on the rows of this rank: q, k and v are `[batch, rows, num_heads, head_dim]`. The
    /// mask is that of the whole sequence, a sink has the same values on every rank.
    pub attention: Attention<'a>,
    /// The rows of this rank.
    pub shard: Shard,
    /// How the work is divided.
    pub scheme: Scheme,
    /// Makes attention block-sparse, in place of [`Attention::block_mask`].
    pub block_mask: Option<&'a DistributedBlockMask>,
    /// Makes the batch packed, in place of [`Attention::cu_seqlens`]: the rows of all ranks are
    /// sequences of different lengths, one after another, which the mask holds for one by one.
    /// Sequence `i` has the rows `cu_seqlens[i]..cu_seqlens[i + 1]` of them, or none; the last
    /// offset is [`Shard::seqlen`]. All ranks have the same offsets. The shard may cut sequences
    /// anywhere. The tensors have one batch entry, and no block mask.
    pub cu_seqlens: Option<&'a [i32]>,
}
