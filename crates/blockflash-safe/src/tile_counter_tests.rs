use super::*;
use std::collections::HashSet;

/// Slots that were never allocated: nothing here calls the driver.
fn counters(limit: usize) -> &'static TileCounters {
    Box::leak(Box::new(TileCounters { address: 4096, slots: Mutex::new(Slots::new(limit)) }))
}

fn lease(slot: Slot, capture: Option<Capture>) -> *mut c_void {
    Box::into_raw(Box::new(Lease { slot, capture })).cast()
}

const fn capture(number: u64) -> Capture {
    Capture { stream: 1, number }
}

#[test]
fn each_has_a_slot_of_its_own_until_all_are_taken() {
    let counters = counters(4);
    let taken: Vec<Slot> = (0..4).map(|_| counters.of_stream().unwrap()).collect();
    let addresses: HashSet<usize> = taken.iter().map(|slot| slot.address() as usize).collect();
    assert_eq!(addresses, [4096, 4104, 4112, 4120].into());
    assert!(matches!(counters.of_stream(), Err(Error::TileCounters { limit: 4 })));
    let mut slots = lock(&counters.slots);
    assert!(matches!(slots.take_for_capture(capture(1)), Err(Error::TileCounters { limit: 4 })));
    assert!(matches!(slots.take_for_stream(1), Err(Error::TileCounters { limit: 4 })));
    assert!(
        slots.captures.is_empty() && slots.foreign.is_empty(),
        "a refusal leaves nothing behind"
    );
    drop(slots);
    // SAFETY: the lease was made for this call.
    unsafe { give_back(lease(taken[2], None)) };
    assert_eq!(counters.of_stream().unwrap().address(), taken[2].address());
}

#[test]
fn slots_of_graphs_return_as_often_as_wanted() {
    let counters = counters(2);
    let kept = counters.of_stream().unwrap();
    for number in 0..10_000 {
        let index = lock(&counters.slots).take_for_capture(capture(number)).unwrap();
        let slot = Slot { counters, index };
        assert_ne!(slot.address(), kept.address());
        assert_eq!(lock(&counters.slots).captures.get(&capture(number)), Some(&index));
        // SAFETY: the lease was made for this call.
        unsafe { give_back(lease(slot, Some(capture(number)))) };
        assert!(lock(&counters.slots).captures.is_empty());
    }
}

#[test]
fn streams_of_others_keep_their_slots() {
    let mut slots = Slots::new(2);
    let first = slots.take_for_stream(7).unwrap();
    let second = slots.take_for_stream(8).unwrap();
    assert_ne!(first, second);
    assert_eq!(
        [slots.take_for_stream(7).unwrap(), slots.take_for_stream(8).unwrap()],
        [first, second]
    );
    assert!(matches!(slots.take_for_stream(9), Err(Error::TileCounters { limit: 2 })));
}
