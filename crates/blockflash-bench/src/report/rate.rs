//! In what the speed of an operation is stated.

use crate::record::Record;

/// Attention of few queries to a cache is limited by what it reads.
const BY_BYTES: &str = "attention_decode";

/// TFLOP/s, or TB/s of an operation that is limited by what it reads; `None` without a time.
pub fn rate(record: &Record) -> Option<f64> {
    match record.op == BY_BYTES {
        true => record.us.map(|us| record.bytes / us * 1e-6),
        false => record.us.and(record.tflops),
    }
}

/// The unit of [`rate`] of some records, which have one operation as a rule.
pub fn unit<'r>(records: impl IntoIterator<Item = &'r Record>) -> &'static str {
    let (mut bytes, mut flops) = (false, false);
    for record in records {
        *(if record.op == BY_BYTES { &mut bytes } else { &mut flops }) = true;
    }
    match (bytes, flops) {
        (true, false) => "TB/s",
        (true, true) => "TFLOP/s or TB/s",
        _ => "TFLOP/s",
    }
}

#[cfg(test)]
mod tests {
    use super::super::sample::record;
    use super::*;

    #[test]
    fn caches_are_read_at_a_rate_of_bytes() {
        let product = record("a", "x", Some(2.0));
        let decode = Record { op: BY_BYTES.into(), bytes: 9e6, ..product.clone() };
        assert_eq!((rate(&product), rate(&decode)), (product.tflops, Some(4.5)));
        assert_eq!(rate(&Record { us: None, ..decode.clone() }), None);
        assert_eq!((unit([&product]), unit([&decode])), ("TFLOP/s", "TB/s"));
        assert_eq!(unit([&decode, &product]), "TFLOP/s or TB/s");
    }
}
