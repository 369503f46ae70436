//! What the thread channel synchronises with: the real thing, or loom's model of it.

#[cfg(loom)]
pub(super) use model::*;
#[cfg(not(loom))]
pub(super) use real::*;

#[cfg(not(loom))]
mod real {
    pub(in super::super) use std::sync::{
        Arc,
        atomic::{AtomicU32, fence},
    };
    use std::{cell::UnsafeCell, time::Duration};

    use rustix::thread::futex;

    /// A cell that only its current owner touches.
    pub(in super::super) struct Cell<T>(UnsafeCell<T>);

    impl<T> Cell<T> {
        pub(in super::super) fn new(value: T) -> Self {
            Self(UnsafeCell::new(value))
        }

        /// A pointer to the value; what is done with it is the caller's to justify.
        pub(in super::super) fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
            f(self.0.get())
        }
    }

    /// A word that can be slept on.
    #[repr(align(128))]
    pub(in super::super) struct Futex {
        pub(in super::super) word: AtomicU32,
    }

    impl Futex {
        pub(in super::super) fn new(value: u32) -> Self {
            Self { word: AtomicU32::new(value) }
        }

        /// Sleeps while the word is `expected`, for `timeout` at most; may wake for nothing.
        pub(in super::super) fn wait(&self, expected: u32, timeout: Duration) {
            let timeout = timeout.try_into().ok();
            // Woken, interrupted, too late or timed out: the caller looks again.
            let _ = futex::wait(&self.word, futex::Flags::PRIVATE, expected, timeout.as_ref());
        }

        /// Wakes the one who sleeps on the word.
        pub(in super::super) fn wake(&self) {
            // Nothing to do about a failure; the sleeper's deadline bounds it.
            let _ = futex::wake(&self.word, futex::Flags::PRIVATE, 1);
        }
    }
}

#[cfg(loom)]
mod model {
    use std::time::Duration;

    use loom::sync::{Condvar, Mutex, atomic::Ordering::Relaxed};
    pub(in super::super) use loom::{
        cell::UnsafeCell as Cell,
        sync::{
            Arc,
            atomic::{AtomicU32, fence},
        },
    };

    /// A word that can be slept on: the kernel's table entry is a lock and a queue.
    pub(in super::super) struct Futex {
        pub(in super::super) word: AtomicU32,
        entry: Mutex<()>,
        queue: Condvar,
    }

    impl Futex {
        pub(in super::super) fn new(value: u32) -> Self {
            Self { word: AtomicU32::new(value), entry: Mutex::new(()), queue: Condvar::new() }
        }

        /// Compares and enqueues in one step, as the kernel does. No deadline passes.
        pub(in super::super) fn wait(&self, expected: u32, _: Duration) {
            let entry = self.entry.lock().unwrap();
            if self.word.load(Relaxed) == expected {
                drop(self.queue.wait(entry).unwrap());
            }
        }

        pub(in super::super) fn wake(&self) {
            let _entry = self.entry.lock().unwrap();
            self.queue.notify_one();
        }
    }
}
