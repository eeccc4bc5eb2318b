use super::Attention;
use super::candle_core::{DType, Device, Result, Tensor, bail};
use super::error::refused;
use super::held::Reading;
use super::memory::{Operand, Place, dtype_of, tensor};
use super::options::read_scores;
use super::paged::{no_gradient, no_gradient_of_scales, read_scales, with_width_of};
use blockflash_ops::{
    AppendKv, AttentionDecode, AttentionDecodeOperands, AttentionDecodeWorkspace, CacheAccess,
    CacheScale, KvCacheMut,
};

/// The keys and values of a batch of sequences of equal length, for generation token by token.
///
/// ```
/// # use blockflash_candle::{Attention, KvCache, Mask};
/// # use candle_core::{DType, Device, Tensor};
/// # let device = Device::Cpu;
/// # let new = |tokens, heads| Tensor::randn(0f32, 1., (1, tokens, heads, 64), &device);
/// let mut cache = KvCache::new(&device, DType::F32, [1, 1000], 2, 64)?;
/// for tokens in [20, 1, 1] {
///     let (q, k, v) = (new(tokens, 8)?, new(tokens, 2)?, new(tokens, 2)?);
///     let attention = Attention { scores: Mask::causal().into(), ..Attention::new(&q, &k, &v) };
///     let o = attention.append_to(&mut cache)?;
///     assert_eq!(o.dims(), q.dims());
/// }
/// assert_eq!(cache.len(), 22);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// The memory is allocated at the start and is this crate's, not candle's, since candle's tensors
/// do not change.
///
/// A cache of `F8E4M3` holds codes of 8 bits of keys and values that are f16, bf16 or f32. Appends
/// choose a scale for each row, so that its greatest magnitude is the greatest code, 448; or they
/// divide by scales that [`with_scales`](Self::with_scales) gives. Rows are rounded to nearest with
/// ties to even, and saturate. That runs on the CPU, and on a GPU that has a kernel for it.
#[derive(Debug)]
pub struct KvCache {
    memory: Memory,
    len: usize,
    workspace: Option<AttentionDecodeWorkspace>,
}

#[derive(Debug)]
struct Memory {
    k: blockflash_ops::Tensor,
    v: blockflash_ops::Tensor,
    scales: Scales,
    /// i32 `[capacity + 1, batch]`: row `n` is the lengths of sequences with `n` keys, so that no
    /// step copies anything to the device.
    lengths: blockflash_ops::Tensor,
}

/// The scales of keys and of values.
#[derive(Debug)]
enum Scales {
    /// Of a cache that holds keys as they are.
    Absent,
    /// f32 `[batch, capacity, num_heads_kv]`, which appends choose.
    PerToken(Box<[blockflash_ops::Tensor; 2]>),
    Given([Tensor; 2]),
}

impl KvCache {
    /// Room for `batch` sequences of up to `capacity` keys, f16, bf16, `F8E4M3` or, on the
    /// CPU, f32.
    ///
    /// # Errors
    /// Another element type, no head or head_dim, a capacity beyond `i32::MAX`, out of memory.
    pub fn new(
        device: &Device,
        dtype: DType,
        [batch, capacity]: [usize; 2],
        num_heads_kv: usize,
        head_dim: usize,
    ) -> Result<Self> {
        Self::with_head_dims(device, dtype, [batch, capacity], num_heads_kv, [head_dim; 2])
    }

    /// [`new`](Self::new) for keys and values of their own head dimensions.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_head_dims(
        device: &Device,
        dtype: DType,
        [batch, capacity]: [usize; 2],
        num_heads_kv: usize,
        [of_k, of_v]: [usize; 2],
    ) -> Result<Self> {
        let (dtype, is_coded) = match dtype {
            DType::F8E4M3 => (blockflash_ops::DType::E4M3, true),
            dtype => (dtype_of("a cache", dtype)?, false),
        };
        let Ok(most) = i32::try_from(capacity) else {
            bail!("capacity is {capacity} keys, the limit is {}", i32::MAX)
        };
        let head_dim = of_k.min(of_v);
        if num_heads_kv == 0 || head_dim == 0 {
            bail!(
                "num_heads_kv and head_dim are {num_heads_kv} and {head_dim}, expected at least 1"
            );
        }
        let shape = |head_dim| [batch, capacity, num_heads_kv, head_dim];
        Place::of(device)?.run(|stream| {
            let k = blockflash_ops::Tensor::zeros(stream, dtype, &shape(of_k))?;
            let v = blockflash_ops::Tensor::zeros(stream, dtype, &shape(of_v))?;
            let scales = if is_coded {
                let shape = [batch, capacity, num_heads_kv];
                let new =
                    || blockflash_ops::Tensor::zeros(stream, blockflash_ops::DType::F32, &shape);
                Scales::PerToken(Box::new([new()?, new()?]))
            } else {
                Scales::Absent
            };
            let lengths: Vec<i32> =
                (0..=most).flat_map(|length| std::iter::repeat_n(length, batch)).collect();
            let shape = [capacity + 1, batch];
            let lengths = blockflash_ops::Tensor::from_slice(stream, &lengths, &shape)?;
            let memory = Memory { k, v, scales, lengths };
            Ok(Self { memory, len: 0, workspace: None })
        })
    }

    /// The cache, of `F8E4M3` and without keys, with these scales, with which codes are multiplied
    /// and by which appends divide: f32 `[1]`, `[batch, num_heads_kv]`, or
    /// `[batch, capacity, num_heads_kv]` for rows, where any extent may be 1. They should be finite
    /// and positive.
    ///
    /// # Errors
    /// Another cache, or one that has keys; another type or shape of scales, or scales that need a
    /// gradient, since there is none.
    pub fn with_scales(mut self, k_scale: &Tensor, v_scale: &Tensor) -> Result<Self> {
        if !self.is_empty() {
            bail!("the cache has {} keys with other scales, expected none", self.len);
        }
        no_gradient_of_scales([Some(k_scale), Some(v_scale)])?;
        let scales = [k_scale, v_scale];
        self.memory.scales = Scales::Given(scales.map(Tensor::clone));
        let place = Place::of(k_scale.device())?;
        let locked = scales.map(|scale| Some(scale.storage_and_layout()));
        let given = read_scales(&locked, &place)?;
        let fits = self.memory.cache(&given, 0).and_then(|cache| cache.as_cache()?.sizes());
        fits.map_err(refused)?;
        Ok(self)
    }

    /// Keys of each sequence.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no key yet.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Most keys of a sequence.
    pub fn capacity(&self) -> usize {
        self.memory.k.shape()[1]
    }

    /// Keeps the first `len` keys of each sequence, all if there are no more.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Appends keys and values `[batch, tokens, num_heads_kv, head_dim]` in the type of the cache,
    /// or in f16, bf16 or f32 if that is `F8E4M3`, as after a prompt whose attention was computed
    /// without the cache.
    ///
    /// # Errors
    /// Other shapes or types, or more tokens than there is room for: the cache then stays as it
    /// was. A tensor that needs a gradient, since there is none; a stream that is being captured.
    pub fn append(&mut self, k: &Tensor, v: &Tensor) -> Result<()> {
        no_gradient([k, k, v])?;
        let len = self.len_with(k)?;
        let place = uncaptured(k.device())?;
        let locked = [k, v].map(|tensor| tensor.storage_and_layout());
        let k = place.read(&Operand::of("k", &locked[0])?)?;
        let v = place.read(&Operand::of("v", &locked[1])?)?;
        let scales = self.memory.given();
        let scales = scales.each_ref().map(|scale| scale.as_ref().map(Tensor::storage_and_layout));
        let scales = read_scales(&scales, &place)?;
        place.run(|stream| {
            let cache = self.memory.cache(&scales, len)?;
            AppendKv::new(k.view, v.view).append_into(cache, stream)
        })?;
        self.len = len;
        Ok(())
    }

    /// The length with new tokens.
    fn len_with(&self, k: &Tensor) -> Result<usize> {
        let (_, tokens, _, _) = k.dims4()?;
        match self.len.checked_add(tokens) {
            Some(len) if len <= self.capacity() => Ok(len),
            _ => bail!(
                "k has {tokens} tokens, and the cache has room for {}: it has {} of {}",
                self.capacity() - self.len,
                self.len,
                self.capacity()
            ),
        }
    }
}

/// Where a call runs. The length of a cache is the program's, so each launch of a graph would
/// append at the same place.
fn uncaptured(device: &Device) -> Result<Place> {
    let place = Place::of(device)?;
    if place.is_captured() {
        bail!(
            "a KvCache cannot be used while candle's stream is being captured: \
             flash_attn_varlen_paged_windowed has its lengths on the device"
        );
    }
    Ok(place)
}

impl Memory {
    /// The scales of keys and of values that the program gave.
    fn given(&self) -> [Option<Tensor>; 2] {
        match &self.scales {
            Scales::Given(scales) => scales.clone().map(Some),
            Scales::Absent | Scales::PerToken(_) => [None, None],
        }
    }

    /// The cache as a call sees it, with sequences of `len` keys and views of
    /// [`given`](Self::given).
    fn cache<'a>(
        &'a mut self,
        given: &[Option<Reading<'a>>; 2],
        len: usize,
    ) -> blockflash_ops::Result<KvCacheMut<'a>> {
        let Self { k, v, scales, lengths } = self;
        let lengths = lengths.view().slice(0, len..len + 1)?.flatten(0..2)?;
        let [k_scale, v_scale] = match scales {
            Scales::PerToken(own) => {
                own.each_mut().map(|scale| Some(CacheScale::PerToken(scale.view_mut())))
            }
            Scales::Absent | Scales::Given(_) => given
                .each_ref()
                .map(|scale| scale.as_ref().map(|scale| CacheScale::Given(scale.view))),
        };
        Ok(KvCacheMut {
            seqused_kv: Some(lengths),
            k_scale,
            v_scale,
            ..KvCacheMut::new(k.view_mut(), v.view_mut())
        })
    }
}

impl Attention<'_> {
    /// Appends k and v, `[batch, tokens, num_heads_kv, head_dim]`, to a cache and attends to all
    /// of its keys. Masks are aligned at the last query and key.
    ///
    /// # Errors
    /// Those of [`AttentionDecode::append`], as text, and of [`KvCache::append`]; `cu_seqlens` and
    /// `block_mask`, which are for attention without a cache.
    pub fn append_to(&self, cache: &mut KvCache) -> Result<Tensor> {
        let Attention { q, k, v, .. } = *self;
        no_gradient([q, k, v])?;
        let given =
            [("cu_seqlens", self.cu_seqlens.is_some()), ("block_mask", self.block_mask.is_some())];
        if let Some((what, _)) = given.into_iter().find(|&(_, given)| given) {
            bail!("{what} is given, expected None: attention to a KvCache takes none");
        }
        let len = cache.len_with(k)?;
        let place = uncaptured(q.device())?;
        let o_shape = with_width_of(q, v);
        let mut o = place.allocate(dtype_of("q", q.dtype())?, &o_shape, false)?;
        let locked = [q, k, v].map(|tensor| tensor.storage_and_layout());
        let read = |what, at: usize| place.read(&Operand::of(what, &locked[at])?);
        let (q_read, k_read, v_read) = (read("q", 0)?, read("k", 1)?, read("v", 2)?);
        let scores = self.scores.map(Tensor::storage_and_layout);
        let scores = read_scores(&scores, &place)?;
        let scales = cache.memory.given();
        let scales = scales.each_ref().map(|scale| scale.as_ref().map(Tensor::storage_and_layout));
        let scales = read_scales(&scales, &place)?;
        {
            let mut o = place.write(&mut o, &o_shape)?;
            let decode = AttentionDecode {
                scores: scores.as_ref().map(|tensor| tensor.view),
                ..AttentionDecode::new(q_read.view)
            };
            let new = AppendKv::new(k_read.view, v_read.view);
            let KvCache { memory, workspace, .. } = &mut *cache;
            place.run(|stream| {
                let cache = memory.cache(&scales, len)?;
                let needed = decode.workspace_bytes(&cache.as_cache()?, stream.device())?;
                if needed > workspace.as_ref().map_or(0, AttentionDecodeWorkspace::bytes) {
                    *workspace = Some(AttentionDecodeWorkspace::new(stream, needed)?);
                }
                let decode = AttentionDecode { workspace: workspace.as_ref(), ..decode };
                let (cache, o) = (CacheAccess::Append(&new, cache), o.view.reborrow());
                decode.forward_into(AttentionDecodeOperands { cache, o, lse: None }, stream)
            })?;
        }
        cache.len = len;
        Ok(tensor(o, &o_shape))
    }
}
