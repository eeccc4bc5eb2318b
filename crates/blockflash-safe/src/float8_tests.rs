use super::{E4M3, E5M2};

/// A code by the definition of the formats.
fn defined(code: u8, fraction: i32, bias: i32) -> f64 {
    let exponent = i32::from(code & 0x7f) >> fraction;
    let rest = f64::from(code & ((1 << fraction) - 1)) / f64::from(1 << fraction);
    let magnitude = match exponent {
        0 => rest * 2f64.powi(1 - bias),
        _ => (1.0 + rest) * 2f64.powi(exponent - bias),
    };
    if code >= 0x80 { -magnitude } else { magnitude }
}

#[test]
fn every_code_is_what_the_format_says() {
    for code in 0..=u8::MAX {
        let (found, magnitude) = (E4M3(code).to_f32(), code & 0x7f);
        if magnitude == 0x7f {
            assert!(found.is_nan());
        } else {
            assert_eq!(f64::from(found).to_bits(), defined(code, 3, 7).to_bits(), "{code:#x}");
        }
        let found = E5M2(code).to_f32();
        if magnitude > 0x7c {
            assert!(found.is_nan());
        } else if magnitude == 0x7c {
            assert_eq!(found, if code == 0x7c { f32::INFINITY } else { f32::NEG_INFINITY });
        } else {
            assert_eq!(f64::from(found).to_bits(), defined(code, 2, 15).to_bits(), "{code:#x}");
        }
    }
}

/// The nearest of all finite codes by trying them, of two the even one.
fn nearest(x: f32, codes: &[(u8, f64)]) -> u8 {
    let sign = if x.is_sign_negative() { 0x80 } else { 0 };
    // In f64, greater numbers would be equally far from several codes.
    let magnitude = f64::from(x.abs()).min(2.0 * codes[codes.len() - 1].1);
    let mut best = codes[0];
    for &(code, value) in codes {
        let [new, old] = [value, best.1].map(|value| (magnitude - value).abs());
        if new < old || new == old && code % 2 == 0 {
            best = (code, value);
        }
    }
    sign | best.0
}

/// Numbers around every code and every middle of two, and many others.
fn samples(codes: &[(u8, f64)]) -> Vec<f32> {
    let mut found = vec![0.0, f32::MIN_POSITIVE, 1e-45, 1e30, f32::MAX, f32::INFINITY];
    for pair in codes.windows(2) {
        for x in [pair[0].1, (pair[0].1 + pair[1].1) / 2.0, pair[1].1] {
            let x = x as f32;
            found.extend([x, f32::from_bits(x.to_bits() + 1)]);
            found.extend((x > 0.0).then(|| f32::from_bits(x.to_bits() - 1)));
        }
    }
    found.extend((0..1 << 15).map(|i| f32::from_bits((i << 16) | ((i * 40503) & 0xffff))));
    found.retain(|x| !x.is_nan());
    found
}

#[test]
fn conversion_takes_the_nearest_code() {
    let e4m3: Vec<_> = (0..0x7fu8).map(|code| (code, defined(code, 3, 7))).collect();
    let e5m2: Vec<_> = (0..0x7cu8).map(|code| (code, defined(code, 2, 15))).collect();
    for sign in [1.0, -1.0] {
        for x in samples(&e4m3).into_iter().map(|x| x * sign) {
            let nearest = nearest(x, &e4m3);
            assert_eq!(E4M3::saturated(x).0, nearest, "{x}");
            // 464 is the middle of 448 and what would come next; 448 is even.
            let expected = if x.abs() > 464.0 { 0x7f | nearest & 0x80 } else { nearest };
            assert_eq!(E4M3::from_f32(x).0, expected, "{x}");
        }
        for x in samples(&e5m2).into_iter().map(|x| x * sign) {
            let nearest = nearest(x, &e5m2);
            assert_eq!(E5M2::saturated(x).0, nearest, "{x}");
            // 57344 is odd.
            let expected = if x.abs() >= 61440.0 { 0x7c | nearest & 0x80 } else { nearest };
            assert_eq!(E5M2::from_f32(x).0, expected, "{x}");
        }
    }
    for nan in [f32::NAN, -f32::NAN, f32::from_bits(0x7f80_0001)] {
        assert_eq!([E4M3::from_f32(nan).0, E4M3::saturated(nan).0], [0x7f; 2]);
        assert_eq!([E5M2::from_f32(nan).0, E5M2::saturated(nan).0], [0x7f; 2]);
    }
}

#[test]
fn numbers_come_back() {
    for code in 0..=u8::MAX {
        let (e4m3, e5m2) = (E4M3(code), E5M2(code));
        if !e4m3.to_f32().is_nan() {
            assert_eq!(E4M3::from_f32(e4m3.to_f32()), e4m3);
            assert_eq!(E4M3::saturated(e4m3.to_f32()), e4m3);
        }
        if !e5m2.to_f32().is_nan() {
            assert_eq!(E5M2::from_f32(e5m2.to_f32()), e5m2);
        }
    }
}
