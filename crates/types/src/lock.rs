//! The locks of all crates: those of the standard library, without poisoning.
//!
//! Law: what a thread waits for is in the lock alone. A forked child inherits waiting threads as
//! memory that its own threads reuse: with a table of waiters for the whole process, as
//! `parking_lot` has it, a child's lock would follow pointers into that memory.

mod recursive;

pub use std::sync::{RwLockReadGuard, RwLockWriteGuard};

pub use self::recursive::{RecursiveReadGuard, RecursiveRwLock, RecursiveWriteGuard};

use std::ops::{Deref, DerefMut};
use std::sync::{PoisonError, TryLockError};
use std::time::{Duration, Instant};

/// A mutex that a panic does not poison.
#[derive(Debug, Default)]
pub struct Mutex<T>(std::sync::Mutex<T>);

/// Access to the value of a [`Mutex`].
#[derive(Debug)]
pub struct MutexGuard<'a, T> {
    lock: &'a std::sync::Mutex<T>,
    /// Always set but while a call of this module has released the lock.
    inner: Option<std::sync::MutexGuard<'a, T>>,
}

impl<T> Mutex<T> {
    /// Returns a mutex around `value`.
    pub const fn new(value: T) -> Self {
        Self(std::sync::Mutex::new(value))
    }

    /// Waits for the mutex.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        let inner = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        MutexGuard { lock: &self.0, inner: Some(inner) }
    }

    /// Takes the mutex if no thread has it.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        let inner = unless_taken(self.0.try_lock())?;
        Some(MutexGuard { lock: &self.0, inner: Some(inner) })
    }

    /// Returns the value.
    pub fn into_inner(self) -> T {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the value, which only the caller can reach.
    pub fn get_mut(&mut self) -> &mut T {
        self.0.get_mut().unwrap_or_else(PoisonError::into_inner)
    }
}

fn unless_taken<G>(taken: Result<G, TryLockError<G>>) -> Option<G> {
    match taken {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(error)) => Some(error.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

impl<'a, T> MutexGuard<'a, T> {
    /// Releases the mutex while `call` runs.
    pub fn unlocked<R>(guard: &mut Self, call: impl FnOnce() -> R) -> R {
        guard.inner = None;
        let result = call();
        guard.inner = Some(guard.lock.lock().unwrap_or_else(PoisonError::into_inner));
        result
    }

    /// Has `wait` release the mutex and take it again.
    fn replace<R>(
        &mut self,
        wait: impl FnOnce(std::sync::MutexGuard<'a, T>) -> (std::sync::MutexGuard<'a, T>, R),
    ) -> Option<R> {
        let (inner, result) = wait(self.inner.take()?);
        self.inner = Some(inner);
        Some(result)
    }
}

#[allow(clippy::expect_used, reason = "only this module releases the lock, and takes it again")]
impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.inner.as_deref().expect("the lock is taken")
    }
}

#[allow(clippy::expect_used, reason = "only this module releases the lock, and takes it again")]
impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.inner.as_deref_mut().expect("the lock is taken")
    }
}

/// A condition variable for [`Mutex`].
#[derive(Debug, Default)]
pub struct Condvar(std::sync::Condvar);

/// How a wait with a limit ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitTimeoutResult(bool);

impl WaitTimeoutResult {
    /// Returns true if the time was over.
    pub fn timed_out(self) -> bool {
        self.0
    }
}

impl Condvar {
    /// Returns a condition variable without waiting threads.
    pub const fn new() -> Self {
        Self(std::sync::Condvar::new())
    }

    /// Waits for a notification, or returns without one.
    pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        guard.replace(|inner| (self.0.wait(inner).unwrap_or_else(PoisonError::into_inner), ()));
    }

    /// The same for at most `limit`.
    pub fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, limit: Duration) -> WaitTimeoutResult {
        let waited = guard.replace(|inner| {
            let waited = self.0.wait_timeout(inner, limit);
            let (inner, result) = waited.unwrap_or_else(PoisonError::into_inner);
            (inner, result.timed_out())
        });
        WaitTimeoutResult(waited.unwrap_or(false))
    }

    /// The same until `end`.
    pub fn wait_until<T>(&self, guard: &mut MutexGuard<'_, T>, end: Instant) -> WaitTimeoutResult {
        self.wait_for(guard, end.saturating_duration_since(Instant::now()))
    }

    /// Waits as long as `goes_on` returns true.
    pub fn wait_while<T>(
        &self,
        guard: &mut MutexGuard<'_, T>,
        mut goes_on: impl FnMut(&mut T) -> bool,
    ) {
        while goes_on(&mut *guard) {
            self.wait(guard);
        }
    }

    /// The same for at most `limit`.
    pub fn wait_while_for<T>(
        &self,
        guard: &mut MutexGuard<'_, T>,
        mut goes_on: impl FnMut(&mut T) -> bool,
        limit: Duration,
    ) -> WaitTimeoutResult {
        let end = Instant::now() + limit;
        while goes_on(&mut *guard) {
            if self.wait_until(guard, end).timed_out() {
                return WaitTimeoutResult(goes_on(&mut *guard));
            }
        }
        WaitTimeoutResult(false)
    }

    /// Wakes one waiting thread.
    pub fn notify_one(&self) {
        self.0.notify_one();
    }

    /// Wakes all waiting threads.
    pub fn notify_all(&self) {
        self.0.notify_all();
    }
}

/// A lock with many readers or one writer, which a panic does not poison. A thread that has it and
/// takes it again can wait for ever: see [`RecursiveRwLock`].
#[derive(Debug, Default)]
pub struct RwLock<T>(std::sync::RwLock<T>);

impl<T> RwLock<T> {
    /// Returns a lock around `value`.
    pub const fn new(value: T) -> Self {
        Self(std::sync::RwLock::new(value))
    }

    /// Waits until no thread writes.
    pub fn read(&self) -> RwLockReadGuard<'_, T> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until no other thread has the lock.
    pub fn write(&self) -> RwLockWriteGuard<'_, T> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the lock for writing if no thread has it.
    pub fn try_write(&self) -> Option<RwLockWriteGuard<'_, T>> {
        unless_taken(self.0.try_write())
    }

    /// Returns the value.
    pub fn into_inner(self) -> T {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the value, which only the caller can reach.
    pub fn get_mut(&mut self) -> &mut T {
        self.0.get_mut().unwrap_or_else(PoisonError::into_inner)
    }
}
