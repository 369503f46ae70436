//! Values and locks that belong to the process that made them.
//!
//! ```text
//!   parent: disks, threads, locked files ──fork──▶ child: a copy of the memory, no threads
//!                                                   ├ ProcessBound: an error; never dropped
//!                                                   ├ PerProcess:   empty again
//!                                                   └ CloseOnFork:  closed before fork returns
//! ```
//!
//! Law 1: a child never uses, waits for or drops what it inherited: threads are gone, and any mutex
//! may be held by one of them for ever. The memory is leaked.
//! Law 2: the lock of a file ends with the process that took it, also if that is killed while a
//! child lives on.
//! Law 3: the handler in the child calls nothing but `close` and `futex`, and does not allocate.
#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

use crate::Error;

/// Number of forks between the program's start and this process.
static GENERATION: AtomicU64 = AtomicU64::new(0);
/// Descriptors of all [`CloseOnFork`]. Held during a fork, so that none is half open or half closed.
/// The standard library's mutex has no state but its own memory, and can be released in the child.
static DESCRIPTORS: Mutex<Vec<RawFd>> = Mutex::new(vec![]);
static FORK: ForkGuard = ForkGuard(UnsafeCell::new(None));

/// The lock of [`DESCRIPTORS`], from before a fork until after it.
struct ForkGuard(UnsafeCell<Option<MutexGuard<'static, Vec<RawFd>>>>);

// SAFETY: only the thread that has the lock accesses it.
unsafe impl Sync for ForkGuard {}

fn lock_descriptors() -> MutexGuard<'static, Vec<RawFd>> {
    DESCRIPTORS.lock().unwrap_or_else(PoisonError::into_inner)
}

extern "C" fn before_fork() {
    let guard = lock_descriptors();
    // SAFETY: this thread has the lock, and keeps it until the next handler.
    unsafe { *FORK.0.get() = Some(guard) };
}

extern "C" fn after_fork_in_parent() {
    // SAFETY: `before_fork` of this thread took the lock.
    drop(unsafe { (*FORK.0.get()).take() });
}

extern "C" fn after_fork_in_child() {
    // SAFETY: the only thread of the child is the one that took the lock.
    let guard = unsafe { (*FORK.0.get()).take() };
    GENERATION.fetch_add(1, Ordering::Relaxed);
    draconis_types::disable_buffer_cache();
    for fd in guard.into_iter().flat_map(|mut fds| std::mem::take(&mut *fds).leak()) {
        // SAFETY: a `CloseOnFork` owns it, and neither uses nor closes it in this process.
        unsafe { libc::close(*fd) };
    }
}

/// A process, as the maker of a value.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Process {
    id: u32,
    generation: u64,
}

impl Process {
    /// Returns this process.
    pub fn current() -> Self {
        static WATCH: Once = Once::new();
        WATCH.call_once(|| {
            // SAFETY: the handlers are functions of this library, and last as long as it.
            let failed = unsafe {
                libc::pthread_atfork(
                    Some(before_fork),
                    Some(after_fork_in_parent),
                    Some(after_fork_in_child),
                )
            };
            assert_eq!(failed, 0, "no memory for the handlers of forks");
        });
        Self { id: std::process::id(), generation: GENERATION.load(Ordering::Relaxed) }
    }

    /// Returns an error unless this is the current process.
    ///
    /// # Errors
    /// [`Error::Inherited`] in a forked child.
    pub fn check(self) -> Result<(), Error> {
        match self.generation == GENERATION.load(Ordering::Relaxed) {
            true => Ok(()),
            false => Err(Error::Inherited { process: self.id }),
        }
    }
}

/// A value that exists only in the process that made it. In a forked child it cannot be used, and
/// dropping it does nothing.
#[derive(Debug)]
pub struct ProcessBound<T> {
    maker: Process,
    value: ManuallyDrop<T>,
}

impl<T> ProcessBound<T> {
    /// Binds a value to this process.
    pub fn new(value: T) -> Self {
        Self { maker: Process::current(), value: ManuallyDrop::new(value) }
    }

    /// Returns the value.
    ///
    /// # Errors
    /// [`Error::Inherited`] in a forked child.
    pub fn get(&self) -> Result<&T, Error> {
        self.maker.check().map(|()| &*self.value)
    }

    /// As [`ProcessBound::get`], for changes.
    ///
    /// # Errors
    /// As [`ProcessBound::get`].
    pub fn get_mut(&mut self) -> Result<&mut T, Error> {
        self.maker.check().map(|()| &mut *self.value)
    }
}

impl<T> Drop for ProcessBound<T> {
    fn drop(&mut self) {
        if self.maker.check().is_ok() {
            // SAFETY: the value is not used after this.
            unsafe { ManuallyDrop::drop(&mut self.value) }
        }
    }
}

/// A global value of which each process has its own, empty at first.
#[derive(Debug)]
pub struct PerProcess<T>(AtomicPtr<ProcessBound<T>>);

#[allow(clippy::new_without_default, reason = "it is for statics, which cannot call a trait")]
impl<T: Default + Send + Sync + 'static> PerProcess<T> {
    /// Returns a value that no process has yet.
    pub const fn new() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }

    /// Returns the value of this process.
    pub fn get(&self) -> &T {
        loop {
            let found = self.0.load(Ordering::Acquire);
            // SAFETY: null, or made below and never freed.
            if let Some(Ok(value)) = unsafe { found.as_ref() }.map(ProcessBound::get) {
                return value;
            }
            let new = ptr::from_mut(Box::leak(Box::new(ProcessBound::new(T::default()))));
            // The thread that comes second leaks an empty value.
            let _ = self.0.compare_exchange(found, new, Ordering::AcqRel, Ordering::Relaxed);
        }
    }
}

/// A descriptor that forked children do not inherit, so that a lock on it ends with this process.
#[derive(Debug)]
pub struct CloseOnFork {
    maker: Process,
    fd: ManuallyDrop<OwnedFd>,
}

impl CloseOnFork {
    /// Owns a descriptor. Lock it afterwards: a fork before this call has copied it.
    pub fn new(fd: OwnedFd) -> Self {
        let maker = Process::current();
        lock_descriptors().push(fd.as_raw_fd());
        Self { maker, fd: ManuallyDrop::new(fd) }
    }
}

impl AsFd for CloseOnFork {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Deref for CloseOnFork {
    type Target = OwnedFd;

    fn deref(&self) -> &OwnedFd {
        &self.fd
    }
}

impl Drop for CloseOnFork {
    fn drop(&mut self) {
        if self.maker.check().is_ok() {
            let mut open = lock_descriptors();
            open.retain(|fd| *fd != self.fd.as_raw_fd());
            // SAFETY: it is not used after this.
            unsafe { ManuallyDrop::drop(&mut self.fd) }
        }
    }
}
