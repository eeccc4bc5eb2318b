//! All-gathers that end late or never.

use crate::fake::{Fake, alone, in_process};
use blockflash_fake_driver::Events;
use blockflash_safe::{DType, Error, NcclCommunicator, Result, Tensor};
use std::os::unix::process::ExitStatusExt;
use std::process::Output;
use std::thread::sleep;
use std::time::{Duration, Instant};

const TIMEOUT: Duration = Duration::from_secs(2);
const SIGABRT: i32 = 6;

/// A communicator and its window. One all-gather is done already.
fn gathering(fake: &Fake) -> Result<(NcclCommunicator, Tensor)> {
    let comm = fake.gathering(TIMEOUT)?;
    assert!(comm.reserve_gather(64, &fake.stream)?);
    let window = comm.window(&fake.stream, DType::U8, &[1, 64])?;
    Ok((comm, window))
}

/// Expects that the guard has ended a process, at the right time; gives what that has said.
fn ended(output: &Output, start: Instant) -> String {
    let (took, said) = (start.elapsed(), String::from_utf8_lossy(&output.stderr).into_owned());
    assert_eq!(output.status.signal(), Some(SIGABRT), "{said}");
    let text = "rank 0 of 1 (cuda:0): an all-gather was not done after 4s";
    assert!(said.contains(text) && said.contains("cannot be aborted"), "{said}");
    assert!(took >= 2 * TIMEOUT, "{took:?}: {said}");
    // A busy machine is slow to end a process, but not twice as slow as all this takes.
    assert!(!said.contains("unreachable"), "{said}");
    said
}

#[test]
fn a_gather_that_never_ends_ends_the_process() -> Result<()> {
    let start = Instant::now();
    let name = "guard::a_gather_that_never_ends_ends_the_process";
    let output = in_process(name, |fake| {
        let (comm, mut window) = gathering(fake)?;
        fake.driver.set_events(Events::Pending);
        comm.all_gather(&mut window.view_mut(), &fake.stream)?;
        assert!(matches!(comm.wait(&fake.stream), Err(Error::Lost { .. })));
        eprintln!("a typed error");
        drop((window, comm));
        sleep(4 * TIMEOUT);
        eprintln!("unreachable");
        Ok(())
    })?;
    assert!(output.is_none_or(|output| ended(&output, start).contains("a typed error")));
    Ok(())
}

/// Every thread that asks the driver waits, the watching one as well, and with it all others.
#[test]
fn a_driver_that_keeps_every_thread_keeps_no_process() -> Result<()> {
    let start = Instant::now();
    let name = "guard::a_driver_that_keeps_every_thread_keeps_no_process";
    let output = in_process(name, |fake| {
        let (comm, mut window) = gathering(fake)?;
        fake.driver.set_events(Events::Pending);
        comm.all_gather(&mut window.view_mut(), &fake.stream)?;
        fake.driver.set_events(Events::Stuck);
        drop(comm);
        eprintln!("unreachable");
        Ok(())
    })?;
    output.iter().for_each(|output| drop(ended(output, start)));
    Ok(())
}

/// The second of two is done after its deadline, and after the process would have ended for the
/// first one, but before it would have ended for the second one.
#[test]
fn a_gather_that_ends_late_ends_nothing() -> Result<()> {
    alone("guard::a_gather_that_ends_late_ends_nothing", |fake| {
        let (comm, mut window) = gathering(fake)?;
        let mut gather = || comm.all_gather(&mut window.view_mut(), &fake.stream);
        let start = Instant::now();
        let until = |tenths: u32| sleep((tenths * TIMEOUT / 10).saturating_sub(start.elapsed()));
        fake.driver.set_events(Events::Pending);
        gather()?;
        until(8);
        fake.driver.set_events(Events::Reached);
        until(10);
        fake.driver.set_events(Events::Pending);
        gather()?;
        let error = comm.wait(&fake.stream).unwrap_err();
        assert!(matches!(error, Error::Lost { .. }), "{error}");
        assert!(start.elapsed() > 19 * TIMEOUT / 10, "by the deadline of the second one");
        drop((window, comm));
        until(25);
        fake.driver.set_events(Events::Reached);
        until(40);
        Ok(())
    })
}
