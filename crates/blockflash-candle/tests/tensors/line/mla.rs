//! Decoding over latent rows, against attention to copies of their keys and values.

use super::blockflash_candle::{Attention, Mask, mla_decode};
use super::candle_core::{DType, Device, Result, Tensor, Var};
use super::harness::{normal, types};

const PAGES: usize = 5;
const SLOTS: usize = 16;
const TABLE: [[u32; 2]; 2] = [[3, 1], [0, 4]];
const LENGTHS: [u32; 2] = [21, 6];

fn numbers(tensor: &Tensor) -> Result<Vec<f32>> {
    tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1()
}

#[test]
fn values_are_the_first_elements_of_keys() -> Result<()> {
    let device = Device::Cpu;
    let (table, lengths) = (Tensor::new(&TABLE, &device)?, Tensor::new(&LENGTHS, &device)?);
    for &dtype in types(&device) {
        for (row, width) in [(576, 512), (512, 512), (20, 13)] {
            let cache = normal(&[PAGES, SLOTS, row], dtype)?;
            for (queries, mask) in [(1, Mask::Full), (3, Mask::causal())] {
                let q = normal(&[2, queries, 16, row], dtype)?;
                let o = mla_decode(&q, &cache, &table, &lengths, width, 0.1, mask)?;
                assert_eq!((o.dims(), o.dtype()), (&[2, queries, 16, width][..], dtype));
                let of_one_head = cache.unsqueeze(2)?;
                let same = mla_decode(&q, &of_one_head, &table, &lengths, width, 0.1, mask)?;
                assert_eq!(numbers(&same)?, numbers(&o)?);
                for (sequence, length) in LENGTHS.into_iter().enumerate() {
                    let pages = Tensor::new(&TABLE[sequence], &device)?;
                    let rows = cache.index_select(&pages, 0)?.flatten(0, 1)?;
                    let k = rows.narrow(0, 0, length as usize)?.unsqueeze(1)?.unsqueeze(0)?;
                    let (q, v) = (q.narrow(0, sequence, 1)?, k.narrow(3, 0, width)?.contiguous()?);
                    let attention = Attention::new(&q, &k, &v);
                    let mut scores = attention.scores;
                    (scores.mask, scores.softmax_scale) = (mask, Some(0.1));
                    let expected = Attention { scores, ..attention }.forward()?;
                    let found = numbers(&o.narrow(0, sequence, 1)?)?;
                    assert_eq!(found, numbers(&expected)?, "{dtype:?} {row} {queries}");
                }
            }
        }
    }
    Ok(())
}

/// Rows of codes, and what they stand for.
#[test]
fn rows_of_codes_are_what_they_stand_for() -> Result<()> {
    const CODES: [(u8, f32); 5] = [(0x38, 1.0), (0x40, 2.0), (0xb0, -0.5), (0x44, 3.0), (0, 0.0)];
    const SCALES: [f32; 4] = [0.25, 0.5, 0.125, 1.0];
    let device = Device::Cpu;
    let (mut bytes, mut numbers_of) = (Vec::new(), Vec::new());
    for row in 0..PAGES * SLOTS {
        for column in 0..512 {
            let (code, number) = CODES[(row * 7 + column * 3) % 5];
            bytes.push(code);
            numbers_of.push(number * SCALES[column / 128]);
        }
        bytes.extend(SCALES.iter().flat_map(|scale| scale.to_ne_bytes()));
        for column in 0..64 {
            let number = (row % 4) as f32 - (column % 3) as f32 * 0.5;
            bytes.extend(((number.to_bits() >> 16) as u16).to_ne_bytes());
            numbers_of.push(number);
        }
    }
    let codes = Tensor::from_vec(bytes, (PAGES, SLOTS, 656), &device)?;
    let cache = Tensor::from_vec(numbers_of, (PAGES, SLOTS, 576), &device)?;
    let (table, lengths) = (Tensor::new(&TABLE, &device)?, Tensor::new(&LENGTHS, &device)?);
    let q = normal(&[2, 3, 4, 576], DType::F32)?;
    let of = |cache: &Tensor| mla_decode(&q, cache, &table, &lengths, 512, 0.02, Mask::causal());
    let found = of(&codes)?;
    assert_eq!(found.dims(), [2, 3, 4, 512]);
    assert_eq!(numbers(&found)?, numbers(&of(&cache)?)?);
    assert_eq!(numbers(&of(&codes.unsqueeze(2)?)?)?, numbers(&found)?);
    let narrow = mla_decode(&q, &codes, &table, &lengths, 500, 0.02, Mask::Full).unwrap_err();
    assert!(narrow.to_string().contains("expected 656 and 512"), "{narrow}");
    Ok(())
}

#[test]
fn what_is_wrong_is_named() -> Result<()> {
    let device = Device::Cpu;
    let (table, lengths) = (Tensor::new(&TABLE, &device)?, Tensor::new(&LENGTHS, &device)?);
    let (q, cache) =
        (normal(&[2, 1, 4, 20], DType::F32)?, normal(&[PAGES, SLOTS, 20], DType::F32)?);
    let message = |q: &Tensor, cache: &Tensor, table: &Tensor, lengths: &Tensor, width| {
        mla_decode(q, cache, table, lengths, width, 0.1, Mask::Full).unwrap_err().to_string()
    };
    for width in [0, 21] {
        let found = message(&q, &cache, &table, &lengths, width);
        assert!(found.contains("head_dim_v") && found.contains("1 to 20"), "{found}");
    }
    let two = cache.reshape((PAGES, SLOTS, 2, 10))?;
    assert!(message(&q, &two, &table, &lengths, 8).contains("[pages, page_size, 1, row]"));
    let long = Tensor::new(&[33u32, 6], &device)?;
    let found = message(&q, &cache, &table, &long, 13);
    assert!(found.contains("lengths has 33 keys of sequence 0, expected 0 to 32"), "{found}");
    let beyond = Tensor::new(&[[3u32, 5], [0, 4]], &device)?;
    let found = message(&q, &cache, &beyond, &lengths, 13);
    assert!(found.contains("block_table has page 5 of sequence 0"), "{found}");
    let narrow = q.narrow(3, 0, 16)?;
    assert!(message(&narrow, &cache, &table, &lengths, 13).contains("q has shape"));
    let one = lengths.narrow(0, 0, 1)?;
    let found = message(&q, &cache, &table, &one, 13);
    assert!(found.contains("lengths has shape [1], expected [2], as block_table"), "{found}");
    for (name, table, lengths) in [
        ("block_table", table.to_dtype(DType::F32)?, lengths.clone()),
        ("lengths", table.clone(), lengths.to_dtype(DType::F32)?),
        ("lengths", table.clone(), lengths.unsqueeze(0)?),
    ] {
        let found = message(&q, &cache, &table, &lengths, 13);
        assert!(found.starts_with(name), "{found}");
    }
    let found = message(&q, &cache.to_dtype(DType::F64)?, &table, &lengths, 13);
    assert!(found.starts_with("cache "), "{found}");
    let var = Var::from_tensor(&q)?;
    let found = message(var.as_tensor(), &cache, &table, &lengths, 13);
    assert!(found.contains("no gradient"), "{found}");
    Ok(())
}
