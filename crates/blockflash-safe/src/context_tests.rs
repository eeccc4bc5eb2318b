use super::*;
use crate::cuda_status;

#[test]
fn names() {
    assert_eq!("cpu".parse::<Device>().unwrap(), Device::cpu());
    assert_eq!(Device::cpu().to_string(), "cpu");
    assert!(Device::cpu().is_cpu() && Device::cpu().cuda_properties().is_none());
    for text in [
        "",
        "CPU",
        "cuda:",
        "cuda:x",
        "cuda:-1",
        "cuda:+1",
        "cuda: 1",
        "cuda:99999999999999999999",
        "gpu",
        "cuda0",
    ] {
        let error = text.parse::<Device>().unwrap_err();
        assert!(matches!(error, Error::InvalidDevice { .. }), "{text:?}: {error}");
        assert!(error.to_string().contains("expected cpu, cuda or cuda:N"));
    }
}

/// Without a driver every way to a GPU is an error value that says so; with one, a GPU that does
/// not exist is.
#[test]
fn a_missing_gpu_is_an_error() {
    let missing = [Device::cuda(usize::MAX), Device::cuda(4096), "cuda:4096".parse()];
    match cuda_status() {
        Err(Error::NoDriver) => {
            let ways =
                missing.into_iter().chain([Device::cuda(0), "cuda".parse(), "cuda:0".parse()]);
            ways.for_each(|way| assert!(matches!(way, Err(Error::NoDriver)), "{way:?}"));
            assert_eq!(Device::best(), Device::cpu());
            assert_eq!(
                Error::NoDriver.to_string(),
                "no NVIDIA driver is installed (libcuda not found)"
            );
        }
        Err(Error::DriverTooOld { .. }) => {
            missing
                .into_iter()
                .for_each(|way| assert!(matches!(way, Err(Error::DriverTooOld { .. })), "{way:?}"));
        }
        status => {
            let gpus = status.map_or(0, |driver| driver.devices.len());
            missing.into_iter().for_each(|way| {
                assert!(
                    matches!(way, Err(Error::NoSuchDevice { count, .. }) if count == gpus),
                    "{way:?}"
                );
            });
        }
    }
}

#[test]
fn driver_versions_are_readable() {
    let error = Error::DriverTooOld { found: 12_040, needed: crate::NEEDED_DRIVER_VERSION };
    assert_eq!(
        error.to_string(),
        "the NVIDIA driver supports CUDA 12.4, but 13.0 is needed: update the driver"
    );
}
