//! What tests have in common.

use blockflash_fake_driver::FakeDriver;
use blockflash_fake_nccl::FakeNccl;
use blockflash_safe::{Device, NcclCommunicator, NcclId, Result, Stream};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

pub(crate) const TIMEOUT: Duration = Duration::from_secs(5);

/// The library, the GPU, a stream, and the turn of a test: they look at all memory of the process.
pub(crate) fn setup() -> (FakeNccl, Device, Stream, MutexGuard<'static, ()>) {
    static ONE: Mutex<()> = Mutex::new(());
    let turn = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    FakeDriver::load();
    let nccl = FakeNccl::load();
    let device = Device::cuda(0).unwrap();
    (nccl, device, device.stream().unwrap(), turn)
}

/// Runs the test in a process of its own, whose environment lets it have several ranks; says
/// whether this is that process.
pub(crate) fn has_its_own_process(test: &str) -> bool {
    const NAME: &str = "NCCL_P2P_DIRECT_DISABLE";
    if std::env::var_os(NAME).is_some() {
        return true;
    }
    let mut program = Command::new(std::env::current_exe().unwrap());
    assert!(program.args(["--exact", test]).env(NAME, "1").status().unwrap().success());
    false
}

/// What each of several ranks gives, which join in some way.
pub(crate) fn ranks_by<T: Send>(
    device: &Device,
    world: usize,
    join: impl Fn(&NcclId, usize) -> Result<NcclCommunicator> + Sync,
    call: impl Fn(NcclCommunicator, Stream) -> T + Sync,
) -> Vec<T> {
    let id = NcclId::new().unwrap();
    std::thread::scope(|threads| {
        let start = |rank| {
            let (id, join, call) = (&id, &join, &call);
            threads.spawn(move || {
                let comm = join(id, rank).unwrap();
                call(comm, device.stream().unwrap())
            })
        };
        let threads: Vec<_> = (0..world).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}
