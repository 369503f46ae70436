//! How long to look before sleeping.
//!
//! Waking a sleeper costs microseconds on one CPU and tens of them on an idle second
//! one; looking at a line that the peer is about to write costs a quarter of one. So a
//! receiver looks first. How long it looks follows what looking brought: a hit doubles
//! the budget, a miss halves it, and now and then a miss tries the full budget again.

/// Most looks: some ten microseconds. None in a model, which tries all interleavings.
const MAX_SPINS: u32 = if cfg!(loom) { 0 } else { 1024 };
/// Fewest looks.
const MIN_SPINS: u32 = if cfg!(loom) { 0 } else { 2 };
/// Every so many misses the full budget is tried.
const RETRY_MISSES: u32 = 512;

/// The budget of one receiver.
#[derive(Debug)]
pub(super) struct SpinBudget {
    spins: u32,
    misses: u32,
}

impl Default for SpinBudget {
    fn default() -> Self {
        Self { spins: MAX_SPINS, misses: 0 }
    }
}

impl SpinBudget {
    pub(super) fn new() -> Self {
        Self::default()
    }

    /// Looks until `there` is true; whether it became so within the budget.
    pub(super) fn spin_until(&mut self, mut there: impl FnMut() -> bool) -> bool {
        for _ in 0..self.spins {
            if there() {
                self.spins = (self.spins * 2).min(MAX_SPINS);
                return true;
            }
            std::hint::spin_loop();
        }
        self.misses = self.misses.wrapping_add(1);
        let retry = self.misses.is_multiple_of(RETRY_MISSES);
        self.spins = if retry { MAX_SPINS } else { (self.spins / 2).max(MIN_SPINS) };
        false
    }
}
