//! Work on all cores.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

/// Threads that work at once when nobody says how many.
pub fn cores() -> usize {
    thread::available_parallelism().map_or(1, |cores| cores.get())
}

/// Applies a function to all items on several threads; results are in the order of the items. A
/// panic goes on to the caller.
pub fn map<T: Sync, R: Send>(items: &[T], threads: usize, work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let worker = || {
        let mut done = Vec::new();
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(at) else { return done };
            done.push((at, work(item)));
        }
    };
    let mut done: Vec<(usize, R)> = thread::scope(|scope| {
        let workers: Vec<_> =
            (0..threads.clamp(1, items.len().max(1))).map(|_| scope.spawn(worker)).collect();
        let results = workers.into_iter().map(|worker| worker.join());
        results
            .flat_map(|result| result.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    });
    done.sort_by_key(|(at, _)| *at);
    done.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn order_is_kept() {
        let items: Vec<u64> = (0..100).collect();
        let doubled: Vec<u64> = items.iter().map(|item| item * 2).collect();
        assert_eq!(super::map(&items, 3, |item| item * 2), doubled);
        assert!(super::map(&[] as &[u64], 4, |item| *item).is_empty());
    }
}
