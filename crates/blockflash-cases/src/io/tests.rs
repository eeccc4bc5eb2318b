use super::*;
use blockflash_sys::DType;
use half::{bf16, f16};
use proptest::prelude::*;
use std::io::Cursor;

fn parse(bytes: &[u8]) -> Result<TensorFile> {
    TensorFile::parse("test", Cursor::new(bytes.to_vec()))
}

fn load(bytes: &[u8], name: &str, dtype: DType) -> Result<Array> {
    parse(bytes)?.load(name, dtype)
}

/// A `.npy` file as NumPy writes it.
fn npy(descr: &str, fortran_order: &str, shape: &str, data: &[u8]) -> Vec<u8> {
    let header =
        format!("{{'descr': '{descr}', 'fortran_order': {fortran_order}, 'shape': {shape}, }}");
    let header = format!("{header:117}\n");
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend((header.len() as u16).to_le_bytes());
    bytes.extend(header.as_bytes());
    bytes.extend(data);
    bytes
}

fn safetensors(header: &str, data: &[u8]) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(data);
    bytes
}

fn f32_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn message<T: std::fmt::Debug>(result: Result<T>) -> String {
    result.unwrap_err().to_string()
}

#[test]
fn types_and_orders() {
    let six = |values: [f32; 6]| f32_bytes(&values);
    let rows = npy("<f4", "False", "(2, 3)", &six([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]));
    let array = load(&rows, "anything", DType::F32).unwrap();
    assert_eq!((array.shape(), array.to_f32(1..4)), (&[2, 3][..], vec![2.0, 3.0, 4.0]));
    let columns = npy("<f4", "True", "(2, 3)", &six([1.0, 4.0, 2.0, 5.0, 3.0, 6.0]));
    assert_eq!(load(&columns, "", DType::F32).unwrap(), array);
    let doubles = [1.0f64.to_le_bytes(), 1e-3f64.to_le_bytes()].concat();
    let array = load(&npy("<f8", "False", "(2,)", &doubles), "", DType::BF16).unwrap();
    assert_eq!(array, Array::from(vec![bf16::ONE, bf16::from_f64(1e-3)]));
    let array = load(&npy("<f2", "False", "()", &f16::ONE.to_le_bytes()), "", DType::F16).unwrap();
    assert_eq!((array.shape().len(), array.len()), (0, 1));
    let longs = [7i64.to_le_bytes(), (-1i64).to_le_bytes()].concat();
    let flags =
        safetensors(r#"{"m":{"dtype":"BOOL","shape":[3],"data_offsets":[0,3]}}"#, &[0, 1, 1]);
    let columns = npy("|b1", "True", "(2, 2)", &[1, 0, 1, 1]);
    for (file, expected) in [
        (npy("<i8", "False", "(2,)", &longs), &[7, -1][..]),
        (columns.clone(), &[1, 1, 0, 1]),
        (flags, &[0, 1, 1]),
    ] {
        assert_eq!(load(&file, "m", DType::I32).unwrap().as_i32(), Some(expected));
    }
    let text = message(load(&columns, "", DType::F32));
    assert!(text.contains("holds bool, which cannot be converted to f32"), "{text}");
}

#[test]
fn stacked_matrices_are_transposed_and_cropped() {
    let stack = Array::new(&[3, 2, 2], (1..=12).collect::<Vec<i32>>()).unwrap();
    let transposed = stack.matrices_transposed(&[2, 0]).unwrap();
    assert_eq!(transposed, Array::new(&[2, 2, 2], vec![9, 11, 10, 12, 1, 3, 2, 4]).unwrap());
    assert_eq!(stack.matrices_transposed(&[]).unwrap().shape(), [0, 2, 2]);
    assert!(stack.matrices_transposed(&[3]).is_none() && stack.transposed().is_none());
    let cropped = stack.cropped([[2, 1], [9, 9], [1, 2]]).unwrap();
    assert_eq!(cropped.as_i32().unwrap(), [1, 0, 3, 0, 5, 6, 7, 8, 9, 10, 0, 0]);
    let vector = Array::from(vec![1, 2]);
    assert!(vector.matrices_transposed(&[0]).is_none() && vector.cropped([]).is_none());
}

#[test]
fn npy_refusals() {
    let data = f32_bytes(&[1.0; 6]);
    for (descr, shape, expected) in [
        (">f4", "(6,)", "little-endian"),
        ("|V2", "(12,)", "no bf16"),
        ("<f4", "(2, 4)", "truncated or damaged: shape [2, 4] of f32 needs 160 bytes"),
        ("<f4", "(99999999999999, 99999999999999)", "impossible shape"),
        // 4 TB must not be allocated.
        ("<f4", "(1000000000000,)", "truncated"),
        ("<f4", "(2, 3", "unexpected header"),
        ("<f4", "(6,)", "cannot be converted to i32"),
    ] {
        let text = message(load(&npy(descr, "False", shape, &data), "", DType::I32));
        assert!(text.contains(expected), "{descr} {shape}: {text}");
    }
    for (bytes, expected) in [
        (&b"PK\x03\x04...."[..], "zip archive"),
        (b"hello, world, this is text", "not a .npy or .safetensors file"),
        (b"", "0 bytes"),
    ] {
        let text = message(parse(bytes));
        assert!(text.contains(expected), "{text}");
    }
}

/// What NumPy's reader takes and refuses: all three keys and no others, in any order.
#[test]
fn npy_headers_are_read_by_the_rules_of_numpy() {
    let file = |version: [u8; 2], header: &str| {
        let mut bytes = [b"\x93NUMPY", &version[..]].concat();
        bytes.extend((header.len() as u16).to_le_bytes());
        [bytes, header.into(), f32_bytes(&[1.0; 6])].concat()
    };
    for header in [
        "{'shape': (2, 3), 'fortran_order': False, 'descr': '<f4'}",
        "{\"descr\": \"<f4\" , 'fortran_order' :True,'shape':(6 , ),}\n",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2L, 3L, )}   \n",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2,3)}",
    ] {
        parse(&file([1, 0], header)).unwrap_or_else(|error| panic!("{header}: {error}"));
    }
    for header in [
        "{'descr': '<f4', 'fortran_order': False, 'shape': (6,), 'extra': 1, }",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (6,), 'Shape': (6,), }",
        "{'descr': '<f4', 'shape': (6,), }",
        "{'descr': '<f4', 'fortran_order': 0, 'shape': (6,), }",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (6), }",
        "{'descr': '<f4', 'fortran_order': False, 'shape': 6, }",
        "{'descr': '<f4', 'fortran_order': False, 'shape': [6], }",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2,,3), }",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (6,), } ]",
        "{'note': 'descr', 'descr': '<f4', 'fortran_order': False, 'shape': (6,), }",
        "'descr': '<f4', 'fortran_order': False, 'shape': (6,)",
        "{'descr': '<f4' 'fortran_order': False 'shape': (6,)}",
        "{",
        "{}",
    ] {
        let text = message(parse(&file([1, 0], header)));
        assert!(text.contains("unexpected header"), "{header}: {text}");
    }
    let valid = "{'descr': '<f4', 'fortran_order': False, 'shape': (6,), }";
    assert!(message(parse(&file([1, 1], valid))).contains("unknown version 1.1"));
}

#[test]
fn values_beyond_the_range_are_refused() {
    let file =
        |values: &[f32]| npy("<f4", "False", &format!("({},)", values.len()), &f32_bytes(values));
    let text = message(load(&file(&[1.0, 65504.0, -65505.0, 7e4]), "", DType::F16));
    assert!(text.contains("-6.5505e4 at element 2"), "{text}");
    assert!(load(&file(&[7e4]), "", DType::BF16).is_ok());
    let kept = load(&file(&[f32::INFINITY, f32::NAN]), "", DType::F16).unwrap().to_f32(0..2);
    assert!(kept[0].is_infinite() && kept[1].is_nan());
    let long = npy("<i8", "False", "(1,)", &(1i64 << 40).to_le_bytes());
    assert!(message(load(&long, "", DType::I32)).contains("beyond the range of i32"));
    // The first one is named, whichever thread finds one.
    let mut many = vec![0f32; 100_000];
    many[99_999] = 1e9;
    many[40_000] = 1e8;
    assert!(message(load(&file(&many), "", DType::F16)).contains("element 40000,"));
}

#[test]
fn safetensors_refusals() {
    let file = |info: &str| safetensors(&format!("{{\"x\":{info}}}"), &[0; 8]);
    let info = |dtype: &str, shape: &str, offsets: &str| {
        format!(r#"{{"dtype":"{dtype}","shape":[{shape}],"data_offsets":[{offsets}]}}"#)
    };
    let good = file(&info("F32", "2", "0,8"));
    assert_eq!(load(&good, "x", DType::F16).unwrap().shape(), [2]);
    assert_eq!(message(load(&good, "q", DType::F16)), "test: has no tensor `q` (it has x)");
    for (info, expected) in [
        (info("F32", "3", "0,8"), "invalid shape"),
        (info("F32", "2", "8,16"), "invalid offset"),
        (info("F32", "2", "8,0"), "invalid offset"),
        (
            info("F32", "129000000000", "0,516000000000"),
            "truncated or damaged: the data of its tensors needs 516000000",
        ),
        (info("F32", "4294967296,4294967296", "0,8"), "overflow"),
        (info("U16", "4", "0,8"), "element type U16"),
        (info("F7", "8", "0,8"), "unknown variant `F7`"),
        (r#"{"dtype":"F32"}"#.to_owned(), "missing field"),
    ] {
        let text = message(load(&file(&info), "x", DType::F16));
        assert!(text.contains(expected), "{info}: {text}");
    }
    assert!(message(parse(&safetensors("[1, 2, 3, 4]", &[]))).contains("header:"));
}

/// The data is covered by the tensors, each byte by one.
#[test]
fn safetensors_without_overlap_hole_or_rest() {
    let two = |[begin, end]: [u64; 2], bytes: usize| {
        let count = (end - begin) / 4;
        let header = format!(
            r#"{{"x":{{"dtype":"F32","shape":[2],"data_offsets":[0,8]}},
                "y":{{"dtype":"F32","shape":[{count}],"data_offsets":[{begin},{end}]}}}}"#
        );
        parse(&safetensors(&header, &vec![0; bytes]))
    };
    let both = two([8, 16], 16).unwrap();
    assert!(both.entries().iter().map(|entry| entry.name.as_str()).eq(["x", "y"]));
    for (offsets, bytes, expected) in [
        ([4, 12], 12, "invalid offset for tensor `y`"), // an overlap
        ([0, 8], 8, "invalid offset"),                  // two names of one tensor
        ([12, 20], 20, "invalid offset for tensor `y`"), // a hole
        ([8, 16], 20, "4 bytes after the last tensor"),
        ([8, 16], 12, "truncated"),
    ] {
        let text = message(two(offsets, bytes));
        assert!(text.contains(expected), "{offsets:?} {bytes}: {text}");
    }
    assert!(message(parse(&safetensors("{}", &[0; 4]))).contains("4 bytes after"));
}

#[test]
fn text_of_a_file_reaches_no_terminal_as_it_is() {
    let info = r#"{"dtype":"F32","shape":[2],"data_offsets":[0,8]}"#;
    let escape = r"\u001b]0;owned\u0007\n\u202e";
    let file = safetensors(&format!("{{\"{escape}\":{info}}}"), &[0; 8]);
    let clean = |text: &str| !text.chars().any(|c| c.is_control() || c == '\u{202e}');
    let text = message(load(&file, "x", DType::F32));
    assert!(clean(&text) && text.contains(r"it has \u{1b}]0;owned\u{7}\n\u{202e}"), "{text:?}");
    let kind = format!("{{\"x\":{{\"dtype\":\"{escape}\",\"shape\":[2],\"data_offsets\":[0,8]}}}}");
    let text = message(parse(&safetensors(&kind, &[0; 8])));
    assert!(clean(&text) && text.contains("unknown variant"), "{text:?}");
    let text = message(parse(&npy("\u{1b}[31m", "False", "(2,)", &[0; 8])));
    assert!(clean(&text) && text.contains("element type"), "{text:?}");
    let text = message(TensorFile::open("no\u{1b}[2Jfile.npy"));
    assert!(clean(&text) && text.contains("No such file"), "{text:?}");
    assert_eq!(printable("Größe 'x' \"y\" \\ \r"), "Größe 'x' \"y\" \\ \\r");
}

/// What takes its tensors by name does not take the one array of a `.npy` file for all of them.
#[test]
fn names_are_required() {
    let array = parse(&npy("<f4", "False", "(2,)", &[0; 8])).unwrap();
    let error = array.require(&["q", "k"]).unwrap_err();
    assert!(matches!(&error.problem, Problem::Unnamed { wanted } if wanted == "q, k"), "{error}");
    let info = r#"{"dtype":"F32","shape":[2],"data_offsets":[0,8]}"#;
    let named = parse(&safetensors(&format!("{{\"q\":{info}}}"), &[0; 8])).unwrap();
    assert!(named.require(&["q"]).is_ok());
    assert!(matches!(named.require(&["q", "k"]).unwrap_err().problem, Problem::NoTensor { .. }));
}

/// Other implementations read what is written here, and the reverse.
#[test]
fn safetensors_agrees_with_the_reference_implementation() {
    let folder = std::env::temp_dir().join(format!("blockflash-io-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("x.safetensors");
    let x = Array::new(&[2, 1], vec![bf16::ONE, bf16::NEG_ONE]).unwrap();
    let y = Array::from(vec![1, 2, 3]);
    write(&path, &[("x", &x), ("y", &y)]).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    let reference_bytes = bytes.clone();
    let reference = ::safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let view = reference.tensor("x").unwrap();
    assert_eq!(
        (view.dtype(), view.shape(), view.data()),
        (::safetensors::Dtype::BF16, &[2, 1][..], x.bytes())
    );
    assert_eq!(reference.tensor("y").unwrap().data(), y.bytes());

    let bytes = ::safetensors::serialize(reference.tensors(), None).unwrap();
    assert_eq!(load(&bytes, "x", DType::BF16).unwrap(), x);
    assert_eq!(load(&bytes, "y", DType::I32).unwrap(), y);

    // The larger elements come first: each tensor starts at a multiple of its element size.
    let offsets =
        TensorFile::open(&path).unwrap().entries().iter().map(|entry| entry.offset % 4).max();
    assert_eq!(
        (offsets, TensorFile::open(&path).unwrap().entries()[0].name.as_str()),
        (Some(0), "y")
    );
    assert!(
        message(write(&path, &[("x", &x), ("x", &y)])).contains("two tensors with the same name")
    );
    assert_eq!(std::fs::read(&path).unwrap(), reference_bytes);

    let path = folder.join("z.NPY");
    let z = Array::new(&[3, 1], vec![f16::ONE; 3]).unwrap();
    write(&path, &[("z", &z)]).unwrap();
    assert_eq!(TensorFile::open(&path).unwrap().load("z", DType::F16).unwrap(), z);
    assert_eq!(std::fs::read(&path).unwrap().len(), 128 + 6);
    assert!(message(write(&path, &[("x", &x)])).contains("no such type"));
    assert!(message(write(folder.join("z.txt"), &[("z", &z)])).contains("must end in"));
    assert!(message(TensorFile::open(&folder)).contains("not a regular file"));
    std::fs::remove_dir_all(&folder).unwrap();
}

/// Loads everything that a file claims to hold.
fn read_all(bytes: &[u8]) {
    let Ok(mut file) = parse(bytes) else { return };
    for entry in file.entries().to_vec() {
        for dtype in [DType::F16, DType::I32] {
            if let Ok(array) = file.load(&entry.name, dtype) {
                assert_eq!(array.shape(), entry.shape);
                assert_eq!(array.len(), entry.shape.iter().product::<usize>());
            }
        }
    }
}

fn valid_files() -> [Vec<u8>; 3] {
    let data = f32_bytes(&[1.0, 2.0, 3.0, 4.0]);
    let header = concat!(
        r#"{"__metadata__":{"a":"b"},"#,
        r#""q":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},"#,
        r#""k":{"dtype":"I64","shape":[1],"data_offsets":[8,16]}}"#
    );
    [
        npy("<f4", "True", "(2, 2)", &data),
        npy("<i8", "False", "(2,)", &data),
        safetensors(header, &data),
    ]
}

proptest! {
    #[test]
    fn random_bytes_never_panic(
        magic in prop_oneof![
            Just(&b""[..]),
            Just(&b"\x93NUMPY\x01\x00"[..]),
            Just(&b"\x93NUMPY\x03\x00"[..]),
            Just(&b"\x02\x00\x00\x00\x00\x00\x00\x00{}"[..]),
        ],
        bytes in proptest::collection::vec(any::<u8>(), 0..200),
    ) {
        read_all(&[magic, &bytes].concat());
    }

    #[test]
    fn damaged_files_never_panic(
        which in 0..3usize,
        damage in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        cut in proptest::option::of(any::<prop::sample::Index>()),
    ) {
        let mut bytes = valid_files()[which].clone();
        for (at, value) in damage {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        read_all(&bytes);
    }

    /// Digits are where sizes are lied about.
    #[test]
    fn lying_headers_never_panic(
        which in 0..3usize,
        sizes in proptest::collection::vec(
            prop_oneof![0..9u64, any::<u64>(), Just(1u64 << 62)],
            1..8,
        ),
    ) {
        let text = String::from_utf8_lossy(&valid_files()[which][8..]).into_owned();
        let mut sizes = sizes.iter().cycle();
        let mut header = String::new();
        for part in text.split_inclusive([',', '[', '(', ' ', ']', ')']) {
            if part.trim_end_matches([',', ']', ')']).parse::<u64>().is_ok() {
                header += &sizes.next().unwrap().to_string();
                header.extend(part.chars().last().filter(|last| !last.is_ascii_digit()));
            } else {
                header += part;
            }
        }
        let bytes = if which == 2 {
            safetensors(&header, &[0; 16])
        } else {
            [&valid_files()[which][..8], header.as_bytes()].concat()
        };
        read_all(&bytes);
    }
}
