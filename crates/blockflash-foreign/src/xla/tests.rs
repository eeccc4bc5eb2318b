use super::api::*;
use super::fake::{Fake, Times};
use super::*;
use std::mem::offset_of;
use std::ptr::{null, null_mut};

/// The refusal of a call that was changed.
fn refusal(change: impl FnOnce(&mut Fake)) -> String {
    let mut fake = Fake::new();
    change(&mut fake);
    let refusal = fake.answer::<Times>(false).unwrap_err();
    assert_eq!(fake.written, [0.0; 6], "{refusal:?}");
    refusal.text
}

#[test]
fn a_target_gets_operands_results_and_attributes() {
    let mut fake = Fake::new();
    assert_eq!(fake.handle::<Times>(), None);
    assert_eq!(fake.written, [3.0, 6.0, 9.0, 12.0, 15.0, 18.0]);
}

#[test]
fn errors_and_panics_are_errors_of_xla() {
    let mut fake = Fake::new();
    fake.operand.dtype = XLA_FFI_DataType_F64;
    let (code, text) = fake.handle::<Times>().unwrap();
    assert_eq!(code, XLA_FFI_Error_Code_INVALID_ARGUMENT);
    assert!(text.starts_with("x is XLA's type 12: float16"), "{text}");
    let mut fake = Fake::new();
    fake.number = 0;
    let (code, text) = fake.handle::<Times>().unwrap();
    assert_eq!(code, XLA_FFI_Error_Code_INTERNAL);
    assert_eq!(text, "blockflash panicked: nothing times 0");
}

#[test]
fn structs_of_a_wrong_size_are_refused() {
    assert!(refusal(|fake| fake.frame.struct_size = 8).contains("has 8 bytes"));
    assert!(refusal(|fake| fake.frame.struct_size -= 1).contains("bytes, expected"));
    assert!(refusal(|fake| fake.api.struct_size = 16).contains("functions have 16 bytes"));
    assert!(refusal(|fake| fake.operand.struct_size = 40).contains("operand 0 has 40 bytes"));
    assert!(refusal(|fake| fake.result.struct_size = 0).contains("result 0 has 0 bytes"));
    // A newer runtime has longer ones.
    let mut fake = Fake::new();
    fake.frame.struct_size += 64;
    fake.operand.struct_size += 8;
    assert_eq!(fake.answer::<Times>(false), Ok(()));
}

#[test]
fn another_version_of_the_interface_is_refused() {
    let text = refusal(|fake| fake.api.api_version.major_version = 1);
    assert!(text.contains("version 1.3 of the interface, expected 0.x"), "{text}");
    let text = refusal(|fake| fake.frame.stage = XLA_FFI_ExecutionStage_PREPARE);
    assert!(text.contains("stage 1"), "{text}");
}

#[test]
fn null_pointers_are_refused() {
    // SAFETY: there is nothing to be valid.
    let none = unsafe { answer::<Times>(null_mut(), false) };
    assert!(none.unwrap_err().text.contains("there is none"));
    assert!(refusal(|fake| fake.frame.api = null()).contains("functions have 0 bytes"));
    assert!(refusal(|fake| fake.frame.args.args = null_mut()).contains("operand: no list of 1"));
    assert!(refusal(|fake| fake.frame.args.types = null_mut()).contains("operand: no list of 1"));
    assert!(refusal(|fake| fake.frame.rets.rets = null_mut()).contains("result: no list of 1"));
    assert!(refusal(|fake| fake.operands = [null_mut()]).contains("operand 0 has 0 bytes"));
    assert!(refusal(|fake| fake.operand.dims = null_mut()).contains("no dimensions"));
    assert!(refusal(|fake| fake.operand.data = null_mut()).contains("operand 0 has no memory"));
    assert!(refusal(|fake| fake.frame.attrs.names = null_mut()).contains("have no names"));
    assert!(refusal(|fake| fake.names[1] = null_mut()).contains("attribute 1 has no name"));
    assert!(refusal(|fake| fake.attributes[0] = null_mut()).contains("times is an attribute"));
    assert!(refusal(|fake| fake.scalar.value = null_mut()).contains("times is an attribute"));
    assert!(refusal(|fake| fake.word.ptr = null()).contains("word is an attribute"));
}

#[test]
fn sizes_and_types_that_cannot_be_are_refused() {
    assert!(refusal(|fake| fake.dims = [-2, 3]).contains("has shape [-2, 3]"));
    assert!(refusal(|fake| fake.dims = [i64::MAX, 3]).contains("has shape"));
    assert!(refusal(|fake| fake.dims = [0, -1]).contains("has shape [0, -1]"));
    assert!(refusal(|fake| fake.operand.rank = -1).contains("no dimensions"));
    assert!(refusal(|fake| fake.operand.rank = 1 << 40).contains("no dimensions"));
    assert!(refusal(|fake| fake.frame.args.size = -1).contains("-1 of operand"));
    assert!(refusal(|fake| fake.frame.attrs.size = 1 << 40).contains("of attributes"));
    assert!(refusal(|fake| fake.types = [7]).contains("of type 7, expected a buffer"));
    assert!(refusal(|fake| fake.kinds[0] = 99).contains("times is an attribute of an unknown"));
    assert!(refusal(|fake| fake.scalar.dtype = 99).contains("times is an attribute of an unknown"));
    // An operand of another shape than the target takes it for.
    let text = refusal(|fake| fake.operand.rank = 1);
    assert!(text.contains("x: a shape of 1 dimensions with 2 strides"), "{text}");
}

#[test]
fn a_part_is_inside_of_its_buffer() {
    struct Beyond;
    impl Target for Beyond {
        fn run(call: Call<'_>) -> Result<(), Refusal> {
            let x = &call.operands[0];
            assert!(x.part("x", 3, &[3], &[1]).is_ok() && x.part("x", 9, &[0, 3], &[3, 1]).is_ok());
            for (offset, shape) in [(4, 3), (usize::MAX, 1), (0, 7)] {
                let error = x.part("x", offset, &[shape], &[1]).unwrap_err().to_string();
                assert!(error.contains("does not fit into [2, 3]"), "{error}");
            }
            Ok(())
        }
    }
    assert_eq!(Fake::new().answer::<Beyond>(false), Ok(()));
}

#[test]
fn memory_that_is_written_is_nobody_elses() {
    let text = refusal(|fake| fake.result.data = fake.operand.data.wrapping_byte_add(4));
    assert!(text.contains("result 0 shares memory with operand 0"), "{text}");
    // The operand is changed in place, so it cannot be read.
    let text = refusal(|fake| fake.result.data = fake.operand.data);
    assert_eq!(text, "x: it is in the memory of result 0, expected its own");
    let mut fake = Fake::new();
    let mut twice = [fake.results[0]; 2];
    let mut types = [XLA_FFI_RetType_BUFFER; 2];
    (fake.frame.rets.size, fake.frame.rets.rets) = (2, twice.as_mut_ptr());
    fake.frame.rets.types = types.as_mut_ptr();
    let text = fake.answer::<Times>(false).unwrap_err().text;
    assert!(text.contains("result 0 shares memory with another one") || text.contains("result 1"));
}

#[test]
fn the_gpu_is_asked_of_the_runtime() {
    let text = Fake::new().answer::<Times>(true).unwrap_err().text;
    assert!(text.contains("lacks XLA_FFI_DeviceOrdinal_Get"), "{text}");
    let mut fake = Fake::new();
    fake.api.struct_size = offset_of!(XLA_FFI_Api, XLA_FFI_DeviceOrdinal_Get);
    let text = fake.answer::<Times>(true).unwrap_err().text;
    assert!(text.contains("lacks XLA_FFI_DeviceOrdinal_Get"), "{text}");
    /// Answers with what its arguments hold already.
    unsafe extern "C" fn none(_: *mut XLA_FFI_DeviceOrdinal_Get_Args) -> *mut XLA_FFI_Error {
        null_mut()
    }
    unsafe extern "C" fn no_stream(_: *mut XLA_FFI_Stream_Get_Args) -> *mut XLA_FFI_Error {
        null_mut()
    }
    fake.api.struct_size = size_of::<XLA_FFI_Api>();
    fake.api.XLA_FFI_DeviceOrdinal_Get = Some(none);
    fake.api.XLA_FFI_Stream_Get = Some(no_stream);
    let text = fake.answer::<Times>(true).unwrap_err().text;
    assert!(text.contains("the device is -1"), "{text}");
}

#[test]
fn metadata_tells_the_version() {
    // SAFETY: structs of numbers and pointers.
    let (mut metadata, mut extension): (XLA_FFI_Metadata, XLA_FFI_Metadata_Extension) =
        unsafe { std::mem::zeroed() };
    metadata.struct_size = offset_of!(XLA_FFI_Metadata, traits) + size_of::<u32>();
    metadata.traits = 1;
    extension.extension_base.struct_size = size_of::<XLA_FFI_Metadata_Extension>();
    extension.extension_base.type_ = XLA_FFI_Extension_Metadata;
    extension.metadata = &raw mut metadata;
    let mut fake = Fake::new();
    fake.frame.api = null();
    fake.frame.extension_start = (&raw mut extension).cast();
    assert_eq!(fake.handle::<Times>(), None);
    let version = metadata.api_version;
    assert_eq!((version.major_version, version.minor_version), (0, XLA_FFI_API_MINOR));
    assert_eq!(metadata.traits, 0);
    // What has no room stays as it is, and XLA refuses version 0.0.
    metadata.api_version.minor_version = 0;
    metadata.struct_size = 8;
    assert_eq!(fake.handle::<Times>(), None);
    extension.metadata = null_mut();
    fake.frame.extension_start = (&raw mut extension).cast();
    assert_eq!(fake.handle::<Times>(), None);
    assert_eq!(metadata.api_version.minor_version, 0);
    assert_eq!(fake.written, [0.0; 6]);
}
