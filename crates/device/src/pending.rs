//! An answer that is ready or arrives later.

use draconis_types::lock::{Condvar, Mutex};
use std::sync::Arc;

/// Receiving side of a [`Promise`].
#[derive(Debug)]
#[must_use = "the answer of a disk is lost without a waiter"]
pub struct Pending<T>(PendingState<T>);

#[derive(Debug)]
enum PendingState<T> {
    Ready(T),
    Later(Arc<PromiseSlot<T>>),
    Run(Box<dyn DeferredAnswer<T>>),
}

/// An answer that its waiter computes, as on a simulated disk, whose clock only waiters advance.
pub trait DeferredAnswer<T>: Send + Sync + std::fmt::Debug {
    /// Returns true if [`DeferredAnswer::wait`] would return at once.
    fn is_ready(&self) -> bool;

    /// Computes and returns the value; `None` if there is none.
    fn wait(self: Box<Self>) -> Option<T>;
}

#[derive(Debug)]
struct PromiseSlot<T> {
    value: Mutex<PromiseState<T>>,
    changed: Condvar,
}

#[derive(Debug)]
enum PromiseState<T> {
    NotYet,
    Value(T),
    Broken,
}

/// Fulfils its [`Pending`] once; a promise dropped without a value breaks it.
#[derive(Debug)]
pub struct Promise<T>(Arc<PromiseSlot<T>>);

/// Creates a promise and its receiving side.
pub fn promise_pair<T>() -> (Promise<T>, Pending<T>) {
    let slot =
        Arc::new(PromiseSlot { value: Mutex::new(PromiseState::NotYet), changed: Condvar::new() });
    (Promise(slot.clone()), Pending(PendingState::Later(slot)))
}

impl<T> Pending<T> {
    /// Creates an answer that is ready.
    pub fn ready(value: T) -> Self {
        Self(PendingState::Ready(value))
    }

    /// Creates an answer that `wait` computes.
    pub fn deferred(answer: impl DeferredAnswer<T> + 'static) -> Self {
        Self(PendingState::Run(Box::new(answer)))
    }

    /// Returns true if [`Pending::wait`] would return at once.
    pub fn is_ready(&self) -> bool {
        match &self.0 {
            PendingState::Ready(_) => true,
            PendingState::Later(slot) => !matches!(*slot.value.lock(), PromiseState::NotYet),
            PendingState::Run(answer) => answer.is_ready(),
        }
    }

    /// Waits for the value; `None` if the promise was dropped without one.
    pub fn wait(self) -> Option<T> {
        let slot = match self.0 {
            PendingState::Ready(value) => return Some(value),
            PendingState::Run(answer) => return answer.wait(),
            PendingState::Later(slot) => slot,
        };
        let mut kept = slot.value.lock();
        loop {
            match std::mem::replace(&mut *kept, PromiseState::NotYet) {
                PromiseState::Value(value) => return Some(value),
                PromiseState::Broken => return None,
                PromiseState::NotYet => slot.changed.wait(&mut kept),
            }
        }
    }
}

impl<T> Promise<T> {
    /// Delivers the value.
    pub fn fulfill_promise(self, value: T) {
        self.set_state(PromiseState::Value(value));
    }

    fn set_state(&self, what: PromiseState<T>) {
        let mut kept = self.0.value.lock();
        if matches!(*kept, PromiseState::NotYet) {
            *kept = what;
            self.0.changed.notify_all();
        }
    }
}

impl<T> Drop for Promise<T> {
    fn drop(&mut self) {
        // After `fulfill_promise` the waiter may have taken the value already; a late `Broken` is then never
        // read.
        self.set_state(PromiseState::Broken);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fulfilled_promise_delivers_value() {
        let (promise, pending) = promise_pair();
        assert!(!pending.is_ready());
        let giver = std::thread::spawn(move || promise.fulfill_promise(7));
        assert_eq!(pending.wait(), Some(7));
        giver.join().unwrap();
    }

    #[test]
    fn dropped_promise_returns_none() {
        let (promise, pending) = promise_pair::<u8>();
        drop(promise);
        assert!(pending.is_ready());
        assert_eq!(pending.wait(), None);
    }

    #[test]
    fn deferred_answer_is_computed_by_waiter() {
        #[derive(Debug)]
        struct CountedAnswer(Arc<Mutex<u32>>);
        impl DeferredAnswer<u32> for CountedAnswer {
            fn is_ready(&self) -> bool {
                *self.0.lock() > 0
            }
            fn wait(self: Box<Self>) -> Option<u32> {
                let mut made = self.0.lock();
                *made += 1;
                Some(*made)
            }
        }
        let made = Arc::new(Mutex::new(0));
        let (one, other) = (
            Pending::deferred(CountedAnswer(made.clone())),
            Pending::deferred(CountedAnswer(made)),
        );
        assert!(!one.is_ready());
        assert_eq!(one.wait(), Some(1));
        assert!(other.is_ready());
        assert_eq!(other.wait(), Some(2));
    }
}
