use super::*;
use crate::case::Case;
use crate::case::cache_inputs::repeated;
use blockflash_ops::Device;

#[test]
fn large_caches_repeat_their_pages() {
    let stream = Device::cpu().stream().unwrap();
    let drawn = super::super::operands::normal(&[3, 2, 1, 2], DType::F32, 0, 0).unwrap();
    let (period, cache) = (drawn.to_f32(0..12), repeated(&drawn, 8, &stream).unwrap());
    assert_eq!(cache.shape(), [8, 2, 1, 2]);
    let values = cache.to_vec::<f32>(&stream).unwrap();
    assert!(values.iter().zip(period.iter().cycle()).all(|(one, other)| one == other));
}

#[test]
fn what_cannot_be_drawn_is_no_case() {
    for id in [
        "decode_b2_q1_kv100_h4_d16_page16_full_bf16",
        "decode_b2_q1_kv96_h4_d16_page16top7_full_bf16",
        "decode_b2_q1_kv96_h4_d16_page16top2_power_bf16",
        "decode_b2_q17_kv96_h4_d16_page16top2_full_bf16",
        "decode_b2_q97_kv96_h4_d16_contiguous_full_bf16",
        "decode_b0_q1_kv96_h4_d16_contiguous_full_bf16",
        "decode_b2_q1_kv96_h4_d16_contiguous_full_window0_bf16",
        "decode_b2_q1_kv96_h4_d16_page16top2_full_window8_bf16",
        "decode_b2_q1_kv96_h4_d16_page16_full_bf16_e4m3",
        "decode_b2_q1_kv96_h4_d16_page16_full_bf16_e4m3_f16",
        "decode_b2_q1_kv96_h4_d16_page16_full_bf16_f16_bf16",
        "decode_b2_q1_kv96_h4kv1_d16v24_page16_full_latent_bf16",
        "decode_b2_q1_kv96_h4kv1_d16_page16_full_latent_bf16_e4m3_bf16",
        "decode_b2_q1_kv96_h4kv1_d16_page16_full_latents_bf16",
    ] {
        assert!(id.parse::<Case>().is_err(), "{id}");
    }
}

#[test]
fn work_counts_what_is_read() {
    let work = |id: &str| id.parse::<Case>().unwrap().work();
    let row = (2 * 2 * 16 * 2) as f64; // a key and a value of two heads
    let queries = |count: usize| (2 * count * 4 * 16 * 2) as f64;
    let full = work("decode_b2_q1_kv96_h4kv2_d16_contiguous_full_bf16");
    assert_eq!(full.bytes, 192.0 * row + queries(2));
    assert_eq!((full.flops, full.exps), (4.0 * 192.0 * 4.0 * 16.0, 192.0 * 4.0));
    // 96 / 3, 96 / 2 and 96 keys; each of two queries.
    let power = work("decode_b3_q2_kv96_h4kv2_d16_page16_power_bf16");
    assert_eq!(power.bytes, 176.0 * row + queries(6));
    assert_eq!(power.exps, (2.0 * 176.0 - 3.0) * 4.0);
    // Two queries see 8 keys each, and 9 together; of a sequence of 5 keys, 4 and 5.
    let window = work("decode_b2_q2_kv96_h4kv2_d16_contiguous_full_window8_bf16");
    assert_eq!((window.bytes, window.exps), (18.0 * row + queries(4), 32.0 * 4.0));
    let short = work("decode_b1_q2_kv5_h4kv2_d16_contiguous_full_window8_bf16");
    assert_eq!((short.bytes, short.exps), (5.0 * row + queries(2), 9.0 * 4.0));
    let chosen = work("decode_b2_q1_kv96_h4kv2_d16_page16top2_full_bf16");
    assert_eq!(chosen.bytes, 64.0 * row + queries(2));
    // A row holds key and value, of which all heads see all of it.
    let latent = work("decode_b2_q1_kv96_h4kv1_d24v16_page16_full_latent_bf16");
    assert_eq!(latent.bytes, (192 * 24 * 2 + 2 * 4 * 40 * 2) as f64);
    assert_eq!(latent.flops, 2.0 * 192.0 * 4.0 * 40.0);
    // A byte for each element of the cache.
    let codes = work("decode_b2_q1_kv96_h4kv2_d16_contiguous_full_bf16_e5m2_bf16");
    assert_eq!(codes.bytes, 192.0 * row / 2.0 + queries(2));
}

#[test]
fn caches_of_codes_are_right_against_the_oracle() {
    let stream = Device::cpu().stream().unwrap();
    for id in [
        "decode_b3_q2_kv96_h4kv2_d16_page16_power_window20_bf16_e4m3_bf16",
        "decode_b2_q1_kv96_h4kv2_d16_contiguous_full_f16_e5m2_f16",
        "decode_b2_q3_kv64_h2_d24_page16_equal_f32_i8_f32",
    ] {
        let case: Case = id.parse().unwrap();
        assert_eq!(case.to_string(), id);
        let mut operands = case.operands(&stream, 7).unwrap();
        operands.launch(None, &stream).unwrap();
        let results: Vec<Array> =
            operands.results(None, &stream).unwrap().into_iter().map(|(_, array)| array).collect();
        for comparison in operands.compare(&results, 7, &|_| ()).unwrap() {
            assert!(comparison.passed(), "{id}: {comparison:?}");
        }
    }
}

#[test]
fn latent_caches_are_right_against_the_oracle() {
    let stream = Device::cpu().stream().unwrap();
    for id in [
        "decode_b4_q1_kv1024_h16kv1_d576v512_page64_equal_latent_bf16",
        "decode_b3_q4_kv96_h8kv1_d576v512_page16_power_latent_f16",
        "decode_b2_q2_kv100_h128kv1_d512_contiguous_full_latent_bf16",
        "decode_b3_q8_kv60_h6kv2_d20v13_contiguous_power_window17_latent_f32",
        "decode_b3_q2_kv96_h4kv1_d576v512_page16top2_full_latent_bf16",
    ] {
        let case: Case = id.parse().unwrap();
        assert_eq!(case.to_string(), id);
        let mut operands = case.operands(&stream, 7).unwrap();
        assert_eq!(operands.inputs().len(), 2);
        operands.rotate(&stream).unwrap();
        for turn in 0..2 {
            operands.launch(None, &stream).unwrap();
            let results = operands.results(None, &stream).unwrap();
            let results: Vec<Array> = results.into_iter().map(|(_, array)| array).collect();
            for comparison in operands.compare(&results, 7, &|_| ()).unwrap() {
                assert!(comparison.passed(), "{id}, {turn}: {comparison:?}");
            }
        }
    }
}
