//! A driver that says that it is new enough, but lacks a function, as some that are installed by
//! halves do.
#![cfg(target_os = "linux")]

use blockflash_fake_driver::FakeDriver;
use blockflash_safe::{Device, Error, NEEDED_DRIVER_VERSION, cuda_driver_version, cuda_status};

#[test]
fn a_missing_function_is_an_error_that_names_it() {
    FakeDriver::load_without("cuTensorMapEncodeTiled");
    for error in [
        cuda_driver_version().unwrap_err(),
        cuda_status().unwrap_err(),
        Device::cuda(0).unwrap_err(),
    ] {
        let Error::DriverIncomplete { found, symbol } = error else { panic!("{error:?}") };
        assert_eq!(symbol, "cuTensorMapEncodeTiled");
        assert!(found >= NEEDED_DRIVER_VERSION);
    }
    assert!(Device::best().is_cpu());
    assert!(!blockflash_safe::cuda_is_initialised());
}
