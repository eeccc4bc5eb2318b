//! Elements of 8 bits in files.

use super::*;
use blockflash_ops::{E4M3, E5M2};
use blockflash_sys::DType;
use half::f16;
use std::io::Cursor;

#[test]
fn codes_are_written_and_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.safetensors");
    let all: Vec<u8> = (0..=u8::MAX).collect();
    let e4m3 = Array::new(&[16, 16], all.iter().map(|&x| E4M3(x)).collect()).unwrap();
    let e5m2 = Array::new(&[256], all.iter().map(|&x| E5M2(x)).collect()).unwrap();
    let ints = Array::new(&[2, 128], all.iter().map(|&x| x as i8).collect()).unwrap();
    write(&path, &[("a", &e4m3), ("b", &e5m2), ("c", &ints)]).unwrap();
    let load = |name: &str, dtype| TensorFile::open(&path).unwrap().load(name, dtype);
    for (name, dtype, array) in
        [("a", DType::E4M3, &e4m3), ("b", DType::E5M2, &e5m2), ("c", DType::I8, &ints)]
    {
        let found = load(name, dtype).unwrap();
        assert_eq!((found.shape(), found.dtype()), (array.shape(), dtype));
        if dtype == DType::I8 {
            assert_eq!(found.bytes(), array.bytes());
        } else {
            // All NaN become one.
            let [found, array] = [&found, array].map(|array| array.to_f32(0..256));
            let same = |(x, y): (&f32, &f32)| x == y || x.is_nan() && y.is_nan();
            assert!(found.iter().zip(&array).all(same));
        }
    }
    let bytes = std::fs::read(&path).unwrap();
    let reference = ::safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(reference.tensor("a").unwrap().dtype(), ::safetensors::Dtype::F8_E4M3);
    assert_eq!(reference.tensor("b").unwrap().dtype(), ::safetensors::Dtype::F8_E5M2);
    assert_eq!(reference.tensor("c").unwrap().data(), ints.bytes());
    // Numbers are rounded, and are not made of integers, nor integers of them.
    assert_eq!(load("a", DType::F16).unwrap().dtype(), DType::F16);
    assert_eq!(load("c", DType::I32).unwrap().as_i32().unwrap()[..2], [0, 1]);
    assert!(load("a", DType::I8).is_err() && load("c", DType::F32).is_err());

    let path = folder.path().join("c.npy");
    write(&path, &[("c", &ints)]).unwrap();
    assert_eq!(TensorFile::open(&path).unwrap().load("", DType::I8).unwrap(), ints);
    let error = write(folder.path().join("a.npy"), &[("a", &e4m3)]).unwrap_err().to_string();
    assert!(error.contains("cannot hold e4m3"), "{error}");
}

#[test]
fn numbers_beyond_the_range_of_codes_are_refused() {
    let halves = Array::new(&[3], [1.05, -448.0, 449.0].map(f16::from_f32).to_vec()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.npy");
    write(&path, &[("", &halves)]).unwrap();
    let load = |dtype| TensorFile::open(&path).unwrap().load("", dtype);
    let error = load(DType::E4M3).unwrap_err();
    assert!(matches!(error.problem, Problem::Overflow { index: 2, .. }), "{error}");
    assert_eq!(load(DType::E5M2).unwrap().to_f32(0..3), [1.0, -448.0, 448.0]);
    // f64 is rounded once: by way of f32 this would be a tie, and 1.
    let double = 1.0625 + 2f64.powi(-40);
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    let header = format!("{:117}\n", "{'descr': '<f8', 'fortran_order': False, 'shape': (1,), }");
    bytes.extend((header.len() as u16).to_le_bytes());
    bytes.extend(header.as_bytes());
    bytes.extend(double.to_le_bytes());
    let mut file = TensorFile::parse("test", Cursor::new(bytes)).unwrap();
    assert_eq!(file.load("", DType::E4M3).unwrap().to_f32(0..1), [1.125]);
}
