//! Synchronisation primitives of the thread channel: the real ones, or loom's models.

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

        /// Passes a pointer to the value; the caller must justify its use.
        pub(in super::super) fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
            f(self.0.get())
        }
    }

    /// A futex word.
    #[repr(align(128))]
    pub(in super::super) struct Futex {
        pub(in super::super) word: AtomicU32,
    }

    impl Futex {
        pub(in super::super) fn new(value: u32) -> Self {
            Self { word: AtomicU32::new(value) }
        }

        /// Sleeps while the word is `expected`, for at most `timeout`; may wake spuriously.
        pub(in super::super) fn wait(&self, expected: u32, timeout: Duration) {
            let timeout = timeout.try_into().ok();
            // Woken, interrupted, too late or timed out: the caller checks again.
            let _ = futex::wait(&self.word, futex::Flags::PRIVATE, expected, timeout.as_ref());
        }

        /// Wakes the sleeper, if there is one.
        pub(in super::super) fn wake(&self) {
            // A failure is harmless: the sleeper's deadline bounds it.
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

    /// A futex word; the kernel's table entry is modelled as a lock and a queue.
    pub(in super::super) struct Futex {
        pub(in super::super) word: AtomicU32,
        entry: Mutex<()>,
        queue: Condvar,
    }

    impl Futex {
        pub(in super::super) fn new(value: u32) -> Self {
            Self { word: AtomicU32::new(value), entry: Mutex::new(()), queue: Condvar::new() }
        }

        /// Compares and enqueues in one step, as the kernel does. Deadlines never pass.
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
