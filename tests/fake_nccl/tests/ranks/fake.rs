//! What tests begin with, and what they end with.

use blockflash_fake_driver::FakeDriver;
use blockflash_fake_nccl::FakeNccl;
use blockflash_safe::{Device, Error, NcclCommunicator, NcclId, Result, Stream};
use std::process::{Command, Output};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

pub(crate) const TIMEOUT: Duration = Duration::from_secs(5);

/// The libraries, a GPU, and a stream.
pub(crate) struct Fake {
    pub(crate) driver: FakeDriver,
    pub(crate) nccl: FakeNccl,
    pub(crate) device: Device,
    pub(crate) stream: Stream,
}

/// Runs a test when no other one runs, since it looks at all memory of the process, and expects
/// that nothing was done that must not be.
pub(crate) fn with_fake(test: impl FnOnce(&Fake) -> Result<()>) -> Result<()> {
    static ONE: Mutex<()> = Mutex::new(());
    let _turn = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let (driver, nccl) = (FakeDriver::load(), FakeNccl::load());
    let device = Device::cuda(0)?;
    let stream = device.stream()?;
    test(&Fake { driver, nccl, device, stream })?;
    assert_eq!(nccl.faults(), Vec::<String>::new());
    Ok(())
}

/// The same in a process of its own, whose environment lets it have several ranks, and which may
/// abort communicators. Says how that has ended, unless this is that process.
///
/// # Errors
/// Those of the test, in that process.
pub(crate) fn in_process(
    name: &str,
    test: impl FnOnce(&Fake) -> Result<()>,
) -> Result<Option<Output>> {
    const NAME: &str = "NCCL_P2P_DIRECT_DISABLE";
    if std::env::var_os(NAME).is_some() {
        return with_fake(test).map(|()| None);
    }
    let mut program = Command::new(std::env::current_exe().unwrap());
    Ok(Some(program.args(["--exact", name, "--nocapture"]).env(NAME, "1").output().unwrap()))
}

/// The same for a test that succeeds.
pub(crate) fn alone(name: &str, test: impl FnOnce(&Fake) -> Result<()>) -> Result<()> {
    if let Some(output) = in_process(name, test)? {
        let [out, err] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
        assert!(output.status.success() && out.contains("1 passed"), "{out}{err}");
    }
    Ok(())
}

/// Expects this many errors, each of which says that another rank is lost.
pub(crate) fn expect_lost(errors: &[Error], count: usize) {
    assert_eq!(errors.len(), count);
    for error in errors {
        assert!(matches!(error, Error::Lost { .. }), "{error}");
    }
}

impl Fake {
    /// One rank that gathers.
    pub(crate) fn gathering(&self, timeout: Duration) -> Result<NcclCommunicator> {
        NcclCommunicator::gathering(&self.device, &NcclId::new()?, 0, 1, timeout)
    }

    /// What each of several ranks gives.
    pub(crate) fn ranks<T: Send>(
        &self,
        world: usize,
        call: impl Fn(NcclCommunicator, Stream) -> T + Sync,
    ) -> Vec<T> {
        let join = |id: &_, rank| NcclCommunicator::new(&self.device, id, rank, world, TIMEOUT);
        self.ranks_by(world, join, call)
    }

    /// The same of ranks that gather.
    pub(crate) fn gathering_ranks<T: Send>(
        &self,
        world: usize,
        call: impl Fn(NcclCommunicator, Stream) -> T + Sync,
    ) -> Vec<T> {
        let join =
            |id: &_, rank| NcclCommunicator::gathering(&self.device, id, rank, world, TIMEOUT);
        self.ranks_by(world, join, call)
    }

    /// The same of ranks that join in some way.
    pub(crate) fn ranks_by<T: Send>(
        &self,
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
                    call(comm, self.device.stream().unwrap())
                })
            };
            let threads: Vec<_> = (0..world).map(start).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }
}
