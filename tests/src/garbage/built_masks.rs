//! Block masks built from garbage, and attention under them.

use super::guarded::{Guarded, Use};
use super::operands::{Lengths, Operands, Options, Sizes};
use super::values::{damaged, one_of, overwritten, scores, token_mask};
use super::{Blocks, Checked, Ended, Turn, text};
use crate::block_masks::compare_transposed;
use crate::placement::Placement;
use blockflash_ops::{
    BlockChoice, BlockGeometry, BlockMask, BlockMaskBuffer, BlockScores, BlockSource, DType,
    Device, Error, Mask, Stream, Tensor,
};
use bytemuck::cast_slice;
use rand::Rng;
use rand::rngs::StdRng;

/// The source of a mask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    Bool,
    Lists,
    Scores,
    /// Scores that are computed from queries and keys of any bits, NaN among them.
    Computed,
}

/// A mask, and the attention that uses it.
#[derive(Debug)]
struct Built {
    sizes: Sizes,
    geometry: BlockGeometry,
    batch: usize,
    /// Batch entries and heads of the mask.
    groups: [usize; 2],
    source: Source,
    /// Length of the lists, or number of chosen scores.
    k: usize,
    capacity: usize,
    mask: Mask,
    always: bool,
    /// Whether each build also makes the transpose.
    transposed: bool,
    /// Data with which another stream overwrites the source while kernels read it.
    overwritten: Option<u8>,
}

impl Built {
    fn new(turn: &mut Turn<'_>) -> Checked<Self> {
        let sizes = Sizes::new(turn, Blocks::Full);
        let on_gpu = turn.place.other.is_some();
        let random = &mut turn.random;
        let [block_q, block_kv] = sizes.blocks;
        let seqlens = [block_q, block_kv].map(|block| match random.random_range(0..12) {
            0 => random.random_range(1..3),
            _ => random.random_range(1..=(6 * block).min(400)),
        });
        let geometry =
            BlockGeometry::new(seqlens[0], seqlens[1], block_q, block_kv).map_err(text)?;
        let batch = random.random_range(1..=2);
        // There are scores for every head of queries.
        let computed = sizes.mask_heads == sizes.heads_q;
        let sources =
            [Source::Bool, Source::Lists, Source::Lists, Source::Scores, Source::Computed];
        let source = one_of(&sources[..if computed { 5 } else { 4 }], random);
        let entries = if source == Source::Computed { batch } else { one_of(&[1, batch], random) };
        let groups = [entries, sizes.mask_heads];
        let (rows, cols) = (geometry.rows(), geometry.cols());
        let all = entries * sizes.mask_heads * rows * cols;
        Ok(Self {
            k: one_of(&[0, 1, cols / 2, cols, cols + 3], random),
            capacity: if random.random_bool(0.7) { all } else { random.random_range(0..=all) },
            mask: token_mask(seqlens[0].max(seqlens[1]), random),
            always: random.random_bool(0.3),
            transposed: random.random_bool(0.5),
            overwritten: overwritten(on_gpu && source != Source::Computed, random),
            sizes,
            geometry,
            batch,
            groups,
            source,
        })
    }

    /// The last dimension of the source.
    fn width(&self) -> usize {
        if self.source == Source::Lists { self.k } else { self.geometry.cols() }
    }

    fn shape(&self) -> [usize; 4] {
        [self.groups[0], self.groups[1], self.geometry.rows(), self.width()]
    }

    /// The garbage, as raw memory.
    fn garbage(&self, random: &mut StdRng) -> Vec<u8> {
        let cols = self.geometry.cols();
        let count: usize = self.shape().iter().product();
        match self.source {
            Source::Bool => (0..count)
                .map(|_| random.random_range(0u8..4) / 2 * random.random::<u8>())
                .collect(),
            Source::Lists => {
                // Valid lists: distinct columns from a random one on, with −1 (no column) at the
                // end.
                let (first, k) = (random.random_range(0..=cols), self.k.max(1));
                let right: Vec<i32> = (0..count)
                    .map(|at| if at % k < cols { ((first + at) % k.max(cols)) as i32 } else { -1 })
                    .map(|col| if (col as usize) < cols { col } else { -1 })
                    .collect();
                cast_slice(&damaged(&right, cols.saturating_sub(1), random)).to_vec()
            }
            Source::Scores => cast_slice(&scores(count, random)).to_vec(),
            Source::Computed => Vec::new(),
        }
    }

    /// Scores of queries and keys of any bits.
    fn computed(&self, turn: &mut Turn<'_>) -> Result<BlockScores, Error> {
        let Sizes { heads_q, heads_kv, head_dims, types, .. } = self.sizes;
        let stream = &turn.place.stream;
        let mut any = |length, heads| {
            let shape = [self.batch, length, heads, head_dims.qk];
            let bits: Vec<u16> =
                (0..shape.iter().product()).map(|_| turn.random.random()).collect();
            if types.o == DType::F16 {
                Tensor::from_slice::<half::f16>(stream, cast_slice(&bits), &shape)
            } else {
                Tensor::from_slice::<half::bf16>(stream, cast_slice(&bits), &shape)
            }
        };
        let q = any(self.geometry.seqlen_q(), heads_q)?;
        let k = any(self.geometry.seqlen_kv(), heads_kv)?;
        let mut scores = BlockScores::new(self.geometry, q.view(), k.view(), stream)?;
        scores.compute(q.view(), k.view(), stream)?;
        Ok(scores)
    }

    fn choice<'a>(
        &self,
        source: blockflash_ops::View<'a>,
        always: Option<&'a BlockMask>,
    ) -> BlockChoice<'a> {
        let source = match self.source {
            Source::Bool => BlockSource::Bool(source),
            Source::Lists => BlockSource::TopK(source),
            Source::Scores | Source::Computed => BlockSource::Scores { scores: source, k: self.k },
        };
        BlockChoice { source, always, mask: self.mask }
    }

    fn dtype(&self) -> DType {
        match self.source {
            Source::Bool => DType::U8,
            Source::Lists => DType::I32,
            Source::Scores | Source::Computed => DType::F32,
        }
    }

    /// The same on the CPU, which reports whether the garbage is valid.
    fn on_host(
        &self,
        source: &Guarded,
        always: Option<&BlockMask>,
        host: &Stream,
    ) -> Result<BlockMask, Error> {
        let [batch, heads] = self.groups;
        let mut buffer = BlockMaskBuffer::new(self.geometry, batch, heads, self.capacity, host)?;
        buffer.build(&self.choice(source.view(), always), host)?;
        buffer.to_host(host)
    }
}

/// Runs a case.
pub(super) fn built(turn: &mut Turn<'_>) -> Checked<Ended> {
    let case = Built::new(turn)?;
    build(&case, turn).map_err(|error| turn.story(&error, &case))
}

fn build(case: &Built, turn: &mut Turn<'_>) -> Checked<Ended> {
    let (place, [batch, heads]) = (turn.place, case.groups);
    let stream = &place.stream;
    let host = Device::cpu().stream().map_err(text)?;
    let always = case.always.then(|| {
        let count = heads * case.geometry.rows() * case.geometry.cols();
        let visited: Vec<bool> = (0..count).map(|_| turn.random.random_bool(0.2)).collect();
        BlockMask::from_bool(case.geometry, 1, heads, &visited)
    });
    let always_here = always.transpose().map_err(text)?;
    let always = always_here.as_ref().map(|always| always.to(stream)).transpose().map_err(text)?;

    let (computed, content) = if case.source == Source::Computed {
        let scores = case.computed(turn).map_err(text)?;
        turn.wait(case)?;
        let values = scores.scores().to_vec::<f32>(stream).map_err(text)?;
        (Some(scores), cast_slice(&values).to_vec())
    } else {
        (None, case.garbage(&mut turn.random))
    };
    // The margins would all be visited: zeros are columns, not 0 is true, and the bits are a large
    // number.
    let margin = match case.source {
        Source::Lists => 0,
        _ => 0x7F,
    };
    let beside =
        Placement { order: Vec::new(), padding: vec![(turn.random.random_range(0..=1), 1)] };
    let source = |stream: &Stream| {
        Guarded::new("source", case.dtype(), (&case.shape(), &beside, margin), &content, stream)
    };
    let (mut source, source_on_host) = (source(stream)?, source(&host)?);
    let seqlens = [case.geometry.seqlen_q(), case.geometry.seqlen_kv()];
    let lengths = Lengths::Dense { batch: case.batch, seqlens };
    let mut operands = Operands::new(&case.sizes, lengths, turn)?;
    let buffer = BlockMaskBuffer::new(case.geometry, batch, heads, case.capacity, stream);
    let mut buffer = buffer.map_err(text)?;
    let kernels = if case.transposed {
        buffer = buffer.with_transpose(stream).map_err(text)?;
        &place.transposes
    } else {
        &place.masks
    };

    source.used_on(place.other.as_ref())?;
    let view = computed.as_ref().map_or(source.view(), |scores| scores.scores().view());
    let choice = case.choice(view, always.as_ref());
    let with_row: bool = turn.random.random();
    let built = match with_row && place.other.is_some() {
        true => buffer.build_with(turn.pick(kernels), &choice, stream),
        false => buffer.build(&choice, stream),
    };
    source.overwrite(case.overwritten, place.other.as_ref())?;
    let options = Options { mask: case.mask, cu_seqlens: None, block_mask: Some(buffer.mask()) };
    operands.launch(&case.sizes, &options, place).map_err(|error| format!("attention: {error}"))?;
    turn.wait(case)?;
    operands.judge(Use::WrittenWhole, place)?;

    // Whatever the data is, the arrays are a valid mask; where nothing is wrong, they equal the
    // CPU's mask.
    let found = buffer.to_host(stream).map_err(|error| format!("the mask: {error}"))?;
    let said = built.and_then(|()| buffer.check(stream));
    if case.overwritten.is_some() {
        return match said {
            Ok(()) => Ok(Ended::Computed),
            Err(Error::InvalidBlockMask(_)) => Ok(Ended::Refused),
            Err(error) => Err(error.to_string()),
        };
    }
    source.judge(Use::Read, stream)?;
    if case.transposed {
        let host = found.to(&host).map_err(text)?;
        compare_transposed(buffer.mask(), host, stream)?;
    }
    match (said, case.on_host(&source_on_host, always_here.as_ref(), &host)) {
        (Ok(()), Ok(expected))
            if found.to_bool().map_err(text)? == expected.to_bool().map_err(text)? =>
        {
            Ok(Ended::Computed)
        }
        (Err(Error::InvalidBlockMask(_)), Err(Error::InvalidBlockMask(_))) => Ok(Ended::Refused),
        (said, expected) => Err(format!("the build says {said:?}, on the CPU {expected:?}")),
    }
}
