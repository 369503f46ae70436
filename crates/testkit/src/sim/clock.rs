//! Virtual time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Virtual nanoseconds since the start of a simulation. Clones share the time, so that several
/// disks can use one clock.
#[derive(Clone, Debug, Default)]
pub struct Clock(Arc<AtomicU64>);

impl Clock {
    /// Creates a clock at zero.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the time in ns.
    pub fn now_ns(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    /// Advances by `ns`, such as a client's computation.
    pub fn advance(&self, ns: u64) {
        self.0.fetch_add(ns, Ordering::AcqRel);
    }

    /// Advances to `ns`, unless it is already later.
    pub fn advance_to(&self, ns: u64) {
        self.0.fetch_max(ns, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clones_share_monotonic_time() {
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
