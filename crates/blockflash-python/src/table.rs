//! Native objects by number: an operator of torch takes tensors and numbers only, so an object is
//! passed as the number under which it is found here.

use crate::error::{Failure, Result};
use blockflash_ops::Stream;
use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::{Arc, OnceLock, PoisonError, RwLock, RwLockWriteGuard, Weak};

/// Objects of one kind. It keeps none alive: a number is free when the last [`Entry`] is dropped.
pub(crate) struct Table<T: 'static> {
    what: &'static str,
    entries: RwLock<BTreeMap<i64, Weak<Entry<T>>>>,
}

/// An object with its number.
pub(crate) struct Entry<T: 'static> {
    number: i64,
    value: T,
    table: &'static Table<T>,
    /// The entry itself once a graph was captured with it. torch does not tell when its graphs are
    /// gone, and they read the memory of the object, so it stays for the rest of the process.
    captured: OnceLock<Arc<Entry<T>>>,
}

impl<T> Table<T> {
    pub(crate) const fn new(what: &'static str) -> Self {
        Self { what, entries: RwLock::new(BTreeMap::new()) }
    }

    /// Keeps the object under the first number from `wanted` on that is free, or finds the entry of
    /// an object that is the same.
    pub(crate) fn insert(
        &'static self,
        wanted: i64,
        value: T,
        same: impl Fn(&T, &T) -> bool,
    ) -> Arc<Entry<T>> {
        // Dropping an entry takes the lock, so these are dropped after it is released.
        let mut others = Vec::new();
        let mut entries = self.write();
        let mut number = wanted.max(1);
        while let Some(found) = entries.get(&number).and_then(Weak::upgrade) {
            if same(&found.value, &value) {
                drop(entries);
                return found;
            }
            others.push(found);
            number = number % i64::MAX + 1;
        }
        let entry = Arc::new(Entry { number, value, table: self, captured: OnceLock::new() });
        entries.insert(number, Arc::downgrade(&entry));
        drop(entries);
        entry
    }

    /// The object of this number.
    pub(crate) fn find(&self, number: i64) -> Result<Arc<Entry<T>>> {
        let entries = self.entries.read().unwrap_or_else(PoisonError::into_inner);
        entries.get(&number).and_then(Weak::upgrade).ok_or_else(|| {
            let what = self.what;
            Failure::value(format!("there is no {what} of number {number}, or not any more"))
        })
    }

    fn write(&self) -> RwLockWriteGuard<'_, BTreeMap<i64, Weak<Entry<T>>>> {
        self.entries.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Entry<T> {
    pub(crate) fn number(&self) -> i64 {
        self.number
    }

    /// Must be called before the object is used on a stream.
    pub(crate) fn outlive_capture(self: &Arc<Self>, stream: &Stream) -> Result<()> {
        if stream.is_capturing()? {
            self.captured.get_or_init(|| Arc::clone(self));
        }
        Ok(())
    }
}

impl<T> Deref for Entry<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> Drop for Entry<T> {
    fn drop(&mut self) {
        let mut entries = self.table.write();
        // Another object may have taken the number in the meantime.
        if entries.get(&self.number).is_some_and(|entry| entry.strong_count() == 0) {
            entries.remove(&self.number);
        }
    }
}
