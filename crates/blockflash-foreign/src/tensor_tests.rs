use super::*;

/// A part of a buffer of f32, from an element on.
fn part(
    what: &'static str,
    buffer: &mut [f32],
    at: usize,
    sizes: &[i64],
    strides: &[i64],
) -> Described {
    let first = buffer.as_mut_ptr().wrapping_add(at).expose_provenance();
    let layout = layout(what, sizes, strides).unwrap();
    Described { address: first, ..Described::new(what, Device::cpu(), DType::F32, layout) }
}

fn foreign<'a>(described: Described) -> Foreign<'a> {
    // SAFETY: 1. The tests describe elements of buffers that outlive the views. 2. No stream. 3. A
    // buffer is used by one test alone, through one call of `views`.
    unsafe { Foreign::new(described) }
}

/// The text of the error for a written part of 64 elements beside one that is read.
fn refused(read: (usize, &[i64], &[i64]), write: (usize, &[i64], &[i64])) -> Option<String> {
    let mut buffer = vec![0.0; 64];
    let x = foreign(part("x", &mut buffer, read.0, read.1, read.2));
    let y = foreign(part("y", &mut buffer, write.0, write.1, write.2));
    views(([&Some(x)], []), [Some(y)]).err().map(|error| error.to_string())
}

#[test]
fn what_is_written_is_apart_from_everything_else() {
    let rows: (usize, &[i64], &[i64]) = (0, &[4, 4], &[8, 1]);
    // Behind it, in its gaps, on its last element, and equal to it.
    assert_eq!(refused(rows, (32, &[4, 4], &[8, 1])), None);
    assert_eq!(refused(rows, (4, &[4, 4], &[8, 1])).as_deref(), Some("y is between elements of x"));
    assert_eq!(refused(rows, (27, &[1], &[1])).as_deref(), Some("y shares memory with x"));
    assert_eq!(refused(rows, rows).as_deref(), Some("y shares memory with x"));
    // Every third element beside every second one: they meet, at 6.
    let text = refused((0, &[30], &[2]), (3, &[15], &[3]));
    assert_eq!(text.as_deref(), Some("y shares memory with x"));
    // In the second group, and among those that are written.
    let mut buffer = vec![0.0; 8];
    let [a, b, c] = ["a", "b", "c"].map(|what| foreign(part(what, &mut buffer, 0, &[8], &[1])));
    let error = views(([&None], [&Some(a)]), [Some(b)]).unwrap_err();
    assert_eq!(error.to_string(), "b shares memory with a");
    let d = foreign(part("d", &mut buffer, 0, &[8], &[1]));
    let error = views(([], []), [Some(c), Some(d)]).unwrap_err();
    assert_eq!(error.to_string(), "d shares memory with c");
}

#[test]
fn an_element_is_not_written_twice() {
    let mut buffer = vec![0.0; 8];
    let error = views(([], []), [Some(foreign(part("x", &mut buffer, 0, &[2, 8], &[0, 1])))]);
    let error = error.unwrap_err();
    assert!(matches!(error, Error::Operand { what: "x", .. }), "{error}");
    // Reading it is something else.
    let x = foreign(part("x", &mut buffer, 0, &[2, 8], &[0, 1]));
    assert_eq!(x.view().unwrap().shape(), [2, 8]);
}

#[test]
fn views_are_of_the_elements_that_were_described() {
    let mut buffer: Vec<f32> = (0u8..12).map(f32::from).collect();
    let x = foreign(part("x", &mut buffer, 1, &[2, 3], &[6, 2]));
    let stream = x.stream().unwrap();
    let x = Some(x);
    let ([Some(x), None], [], []) = views(([&x, &None], []), []).unwrap() else {
        panic!("one view of one tensor")
    };
    assert_eq!(x.to_vec::<f32>(&stream).unwrap(), [1.0, 3.0, 5.0, 7.0, 9.0, 11.0]);
}

#[test]
fn dimensions_are_permuted() {
    let mut buffer: Vec<f32> = (0u8..6).map(f32::from).collect();
    let x = foreign(part("x", &mut buffer, 0, &[2, 3], &[3, 1]));
    let stream = x.stream().unwrap();
    let x = x.permute(&[1, 0]).unwrap();
    assert_eq!((x.layout().shape(), x.layout().strides()), (&[3, 2][..], &[1, 3][..]));
    let view = x.view().unwrap();
    assert_eq!(view.to_vec::<f32>(&stream).unwrap(), [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]);
    let error = x.permute(&[0]).unwrap_err();
    assert!(matches!(error, Error::Operand { what: "x", .. }), "{error}");
}

#[test]
fn a_tensor_that_was_lent_is_written_again() {
    let mut buffer = vec![0.0; 4];
    let mut x = foreign(part("x", &mut buffer, 0, &[4], &[1]));
    for value in [1.0, 2.0] {
        let ([], [], [Some(mut view)]) = views(([], []), [Some(x.reborrow())]).unwrap() else {
            panic!("one view of one tensor")
        };
        view.as_mut_slice::<f32>().unwrap().fill(value);
    }
    assert_eq!(x.view().unwrap().as_slice::<f32>().unwrap(), [2.0; 4]);
}

#[test]
fn wrong_sizes_and_addresses_name_the_operand() {
    let error = layout("k", &[2, -1], &[1, 1]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "k: shape [2, -1] with strides [1, 1]: a tensor has at most 4 dimensions here, and no \
         negative size or stride"
    );
    assert!(matches!(layout("k", &[1; 9], &[1; 9]), Err(Error::Layout { what: "k", .. })));
    assert!(matches!(layout("k", &[2], &[-1]), Err(Error::Layout { what: "k", .. })));
    let huge = layout("k", &[i64::MAX, 8], &[8, 1]).unwrap_err();
    assert!(matches!(huge, Error::Operand { what: "k", .. }), "{huge}");
    let rows = layout("k", &[3], &[1]).unwrap();
    let missing = Described::new("k", Device::cpu(), DType::F32, rows);
    let error = foreign(missing).view().unwrap_err().to_string();
    assert!(error.starts_with("k: ") && error.contains("null"), "{error}");
    // A tensor without elements needs no memory.
    let empty = layout("k", &[0, 3], &[3, 1]).unwrap();
    let empty = Described { layout: empty, ..missing };
    assert!(foreign(empty).view().is_ok());
}
