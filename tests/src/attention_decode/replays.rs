//! Calls that a graph has captured.

use super::{
    CacheLayout, CodeCase, DecodeCase, DecodeData, DecodeInputs, DecodeOutputs, RotaryCase,
    TailCase,
};
use crate::attention::Choice;
use crate::gpu::wait;
use crate::host::refill;
use crate::number::rng;
use blockflash_ops::{DType, RotaryPairs, Stream};
use blockflash_sys::Kernel;
use rand::Rng;

/// What a captured call does beside reading a cache of numbers of 16 bits.
#[derive(Clone, Copy, Default)]
pub struct Captured {
    /// It appends, with rotary embedding: more queries than the shortest sequences have keys.
    pub append: bool,
    /// A mask of the last keys, which moves with the lengths.
    pub tail: Option<TailCase>,
    /// The cache holds codes, to which nothing is appended.
    pub codes: Option<CodeCase>,
}

/// Captures a call while every sequence has one key, and replays it with other lengths up to the
/// capacity. Each replay gives the bits of a call that is not captured, and some are compared with
/// the oracle, among NaN in all slots without a key.
pub fn replays(
    dtype: DType,
    head_dim: usize,
    captured: Captured,
    kernel: &'static Kernel,
    stream: &Stream,
    count: usize,
) -> Result<usize, String> {
    const LONGEST: usize = 4200;
    let layout = CacheLayout::Paged {
        page_size: 64,
        max_pages: LONGEST.div_ceil(64),
        spare: 0,
        shared: 0,
        heads_first: false,
    };
    let Captured { append, tail, codes } = captured;
    let (choice, queries) = (Choice::This(kernel), if append { 5 } else { 1 });
    let case_of = |lengths: [usize; 3]| DecodeCase {
        layout,
        equal: true,
        append,
        tail,
        codes,
        rotary: append.then_some(RotaryCase {
            dim: head_dim / 2,
            pairs: RotaryPairs::Interleaved,
            dtype,
        }),
        ..DecodeCase::simple(dtype, (8, 2), head_dim, &lengths.map(|keys| (queries, keys)))
    };
    let (short, full) = (case_of([1; 3]), case_of([LONGEST; 3]));
    let mut inputs = DecodeInputs::upload(&short, &DecodeData::generate(&short), stream)?;
    let mut outputs = DecodeOutputs::poisoned(&short, stream)?;
    let graph = stream
        .capture(|stream| inputs.launch(&mut outputs, choice, stream))
        .map_err(|error| format!("capture: {error}"))?;
    let mut compared = 0;
    for lengths in [[1, 2, 3], [0, 64, LONGEST], [1023, 1024, 1025], [777, 4, 3333]] {
        let case = case_of(lengths);
        let data = DecodeData::generate(&case);
        inputs.refill(&case, &data, stream)?;
        outputs.0.poison(stream)?;
        graph.launch(stream).map_err(|error| format!("replay: {error}"))?;
        wait(stream, &|| format!("replay with lengths {lengths:?}"))?;
        inputs.check_cache(&data, stream)?;
        let reference = super::decode_reference(&case, &data);
        compared += outputs.0.check(&case.attention, &reference, stream)?;
    }
    let mut random = rng(0x6EA9);
    inputs.refill(&full, &DecodeData::generate(&full), stream)?;
    for replay in 0..count {
        let lengths: Vec<u32> = (0..3).map(|_| random.random_range(0..=LONGEST as u32)).collect();
        if let Some(seqused) = &mut inputs.seqused {
            refill(seqused, stream, &lengths)?;
        }
        outputs.0.poison(stream)?;
        graph.launch(stream).map_err(|error| format!("replay: {error}"))?;
        wait(stream, &|| format!("replay {replay} with lengths {lengths:?}"))?;
        let replayed = outputs.0.bits(stream)?;
        outputs.0.poison(stream)?;
        inputs.launch(&mut outputs, choice, stream).map_err(|error| error.to_string())?;
        wait(stream, &|| format!("a call with lengths {lengths:?}"))?;
        if replayed != outputs.0.bits(stream)? {
            return Err(format!("replay {replay} with lengths {lengths:?} differs from a call"));
        }
        compared += 1;
    }
    Ok(compared)
}
