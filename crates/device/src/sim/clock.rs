//! Virtual time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Virtual nanoseconds since a simulation began. Clones show the same time, so that several
/// disks can share one.
#[derive(Clone, Debug, Default)]
pub struct Clock(Arc<AtomicU64>);

impl Clock {
    /// A clock at zero.
    pub fn new() -> Self {
        Self::default()
    }

    /// What time it is, in ns.
    pub fn now_ns(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    /// Lets `ns` pass: a client thinks.
    pub fn advance(&self, ns: u64) {
        self.0.fetch_add(ns, Ordering::AcqRel);
    }

    /// Lets time pass until it is `ns`, if it is not that late already.
    pub fn advance_to(&self, ns: u64) {
        self.0.fetch_max(ns, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_is_shared_and_never_goes_back() {
        let (one, other) = {
            let clock = Clock::new();
            (clock.clone(), clock)
        };
        one.advance(5);
        other.advance_to(3);
        assert_eq!((one.now_ns(), other.now_ns()), (5, 5));
        other.advance_to(9);
        assert_eq!(one.now_ns(), 9);
    }
}
