use super::*;

/// Small integers, so that every order of summation gives the same f32.
fn values(count: usize, seed: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 7 + seed * 5) % 11) as f32 - 5.0).collect()
}

/// Every instruction set of this CPU that there is code for.
fn instruction_sets() -> Vec<Arch> {
    let mut found = vec![Arch::Scalar, Arch::new()];
    #[cfg(target_arch = "x86_64")]
    found.extend(pulp::x86::V3::try_new().map(Arch::V3));
    found
}

#[test]
fn every_layout_is_the_triple_loop() {
    for (rows, terms, stride) in [(8, 1, 40), (16, 7, 40), (40, 33, 41), (8, 0, 8), (0, 3, 8)] {
        let (left, right) = (values(rows.max(terms) * stride, 1), values(terms * LANES, 2));
        let (right, _) = right.as_chunks::<LANES>();
        let (old, factors) = (values(rows * LANES, 3), values(LANES, 4));
        let factors: Lanes = factors.try_into().unwrap();
        for in_rows in [true, false] {
            let (values, at): (_, fn(usize, usize, usize) -> usize) = match in_rows {
                true => (Left::Rows { values: &left, stride }, |m, l, stride| m * stride + l),
                false => (Left::Columns { values: &left, stride }, |m, l, stride| l * stride + m),
            };
            for into in [Into::Set(2.0), Into::AddTo(&factors)] {
                for set in instruction_sets() {
                    let mut c = Buffer::new(rows * LANES);
                    c.copy_from_slice(&old);
                    set.dispatch(Product { c: c.panels_mut(), left: values, right, into });
                    for (i, &found) in c.iter().enumerate() {
                        let (m, lane) = (i / LANES, i % LANES);
                        let sum: f32 =
                            (0..terms).map(|l| left[at(m, l, stride)] * right[l][lane]).sum();
                        let expected = match into {
                            Into::Set(scale) => scale * sum,
                            Into::AddTo(factors) => old[i] * factors[lane] + sum,
                        };
                        assert_eq!(found, expected, "{rows} {terms} {in_rows} {set:?} {i}");
                    }
                }
            }
        }
    }
}

#[test]
fn old_contents_do_not_leak() {
    let mut c = [[f32::NAN; LANES]; ROWS];
    let left = Left::Rows { values: &[1.0; 3 * ROWS], stride: 3 };
    multiply(&mut c, left, &[[2.0; LANES]; 3], Into::Set(1.0));
    assert_eq!(c, [[6.0; LANES]; ROWS]);
}

#[test]
fn buffers_begin_at_cache_lines() {
    let mut buffer = Buffer::default();
    for len in [1, 5, 64, 1000] {
        buffer.reserve(len);
        assert!(buffer.len() == len && buffer.iter().all(|&x| x == 0.0));
        assert_eq!(buffer.as_ptr().align_offset(64), 0);
        buffer.fill(1.0);
        buffer.reserve(len - 1);
        assert_eq!(*buffer, *vec![1.0; len]);
    }
}
