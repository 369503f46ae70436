//! A lock whose readers may read again.
//!
//! Law: only a writer keeps readers out, never one that waits. So a thread that reads may call what
//! reads again, and readers that follow each other without a gap keep a writer waiting. The count of
//! readers decides; the lock inside is always free for those whom the count admits.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicUsize, Ordering};

use super::{Condvar, Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Set while a thread writes.
const WRITER: usize = 1 << (usize::BITS - 1);
/// Set while threads wait. The other bits count readers.
const WAITERS: usize = 1 << (usize::BITS - 2);

/// A lock with many readers or one writer. A reader waits only while another thread writes, also
/// if writers wait.
#[derive(Debug, Default)]
pub struct RecursiveRwLock<T> {
    admission: Admission,
    value: RwLock<T>,
}

/// Access for reading to the value of a [`RecursiveRwLock`].
#[derive(Debug)]
pub struct RecursiveReadGuard<'a, T> {
    // Dropped in this order.
    value: RwLockReadGuard<'a, T>,
    _admitted: AdmittedReader<'a>,
}

/// Access for writing to the value of a [`RecursiveRwLock`].
#[derive(Debug)]
pub struct RecursiveWriteGuard<'a, T> {
    // Dropped in this order.
    value: RwLockWriteGuard<'a, T>,
    _admitted: AdmittedWriter<'a>,
}

impl<T> RecursiveRwLock<T> {
    /// Returns a lock around `value`.
    pub const fn new(value: T) -> Self {
        Self { admission: Admission::new(), value: RwLock::new(value) }
    }

    /// Waits until no thread writes.
    pub fn read(&self) -> RecursiveReadGuard<'_, T> {
        self.admission.wait_for(Admission::try_read);
        let admitted = AdmittedReader(&self.admission);
        RecursiveReadGuard { value: self.value.read(), _admitted: admitted }
    }

    /// Waits until no other thread has the lock.
    pub fn write(&self) -> RecursiveWriteGuard<'_, T> {
        self.admission.wait_for(Admission::try_write);
        let admitted = AdmittedWriter(&self.admission);
        RecursiveWriteGuard { value: self.value.write(), _admitted: admitted }
    }

    /// Returns true while a thread writes.
    pub fn is_locked_exclusive(&self) -> bool {
        self.admission.state.load(Ordering::Relaxed) & WRITER != 0
    }

    /// Returns the value.
    pub fn into_inner(self) -> T {
        self.value.into_inner()
    }

    /// Returns the value, which only the caller can reach.
    pub fn get_mut(&mut self) -> &mut T {
        self.value.get_mut()
    }
}

impl<T> Deref for RecursiveReadGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> Deref for RecursiveWriteGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for RecursiveWriteGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

/// Who is in. A thread sets [`WAITERS`] and begins to wait under one lock, so the one that leaves
/// and finds it set notifies after that.
#[derive(Debug, Default)]
struct Admission {
    state: AtomicUsize,
    waiting: Mutex<()>,
    left: Condvar,
}

impl Admission {
    const fn new() -> Self {
        Self { state: AtomicUsize::new(0), waiting: Mutex::new(()), left: Condvar::new() }
    }

    /// The state with one more reader.
    fn try_read(state: usize) -> Option<usize> {
        (state & WRITER == 0).then_some(state + 1)
    }

    /// The state with a writer.
    fn try_write(state: usize) -> Option<usize> {
        (state & !WAITERS == 0).then_some(state | WRITER)
    }

    fn admit(&self, next: fn(usize) -> Option<usize>) -> bool {
        self.state.fetch_update(Ordering::Acquire, Ordering::Relaxed, next).is_ok()
    }

    #[inline]
    fn wait_for(&self, next: fn(usize) -> Option<usize>) {
        if !self.admit(next) {
            self.wait_long(next);
        }
    }

    #[cold]
    fn wait_long(&self, next: fn(usize) -> Option<usize>) {
        let mut waiting = self.waiting.lock();
        loop {
            let decide = |state| next(state).or(Some(state | WAITERS));
            let before = self.state.fetch_update(Ordering::Acquire, Ordering::Relaxed, decide);
            if before.is_ok_and(|state| next(state).is_some()) {
                return;
            }
            self.left.wait(&mut waiting);
        }
    }

    #[cold]
    fn notify(&self) {
        let _waiting = self.waiting.lock();
        self.state.fetch_and(!WAITERS, Ordering::Relaxed);
        self.left.notify_all();
    }
}

#[derive(Debug)]
struct AdmittedReader<'a>(&'a Admission);

impl Drop for AdmittedReader<'_> {
    fn drop(&mut self) {
        if self.0.state.fetch_sub(1, Ordering::Release) == WAITERS + 1 {
            self.0.notify();
        }
    }
}

#[derive(Debug)]
struct AdmittedWriter<'a>(&'a Admission);

impl Drop for AdmittedWriter<'_> {
    fn drop(&mut self) {
        if self.0.state.fetch_and(!WRITER, Ordering::Release) & WAITERS != 0 {
            self.0.notify();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::sync::mpsc;
    use std::thread;

    use super::{RecursiveRwLock, WAITERS};

    #[test]
    fn reads_again_while_a_writer_waits() {
        let lock = RecursiveRwLock::new(0);
        let first = lock.read();
        thread::scope(|threads| {
            threads.spawn(|| *lock.write() += 1);
            while lock.admission.state.load(Ordering::Relaxed) & WAITERS == 0 {
                thread::yield_now();
            }
            assert_eq!(*lock.read(), 0);
            drop(first);
        });
        assert_eq!(*lock.read(), 1);
    }

    #[test]
    fn a_waiting_reader_sees_what_was_written() {
        let lock = RecursiveRwLock::new(0);
        let (sender, receiver) = mpsc::channel();
        let mut writing = lock.write();
        assert!(lock.is_locked_exclusive());
        thread::scope(|threads| {
            threads.spawn(|| sender.send(*lock.read()));
            while lock.admission.state.load(Ordering::Relaxed) & WAITERS == 0 {
                thread::yield_now();
            }
            *writing = 7;
            drop(writing);
            assert_eq!(receiver.recv(), Ok(7));
        });
        assert!(!lock.is_locked_exclusive());
    }

    #[test]
    fn writers_exclude_each_other_and_readers() {
        let lock = RecursiveRwLock::new((0_u64, 0_u64));
        let reads = AtomicU64::new(0);
        thread::scope(|threads| {
            for _ in 0..3 {
                threads.spawn(|| {
                    for _ in 0..20_000 {
                        let mut pair = lock.write();
                        pair.0 += 1;
                        pair.1 += 1;
                    }
                });
                threads.spawn(|| {
                    for _ in 0..20_000 {
                        let pair = lock.read();
                        let again = lock.read();
                        assert_eq!(pair.0, pair.1);
                        assert_eq!(*pair, *again);
                        reads.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
        });
        assert_eq!(lock.into_inner(), (60_000, 60_000));
        assert_eq!(reads.into_inner(), 60_000);
    }
}
