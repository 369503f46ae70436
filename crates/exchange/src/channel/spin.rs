//! How long to look before sleeping.
//!
//! Waking a sleeper costs microseconds on one CPU and tens of them on an idle second
//! one; looking at a line that the peer is about to write costs a quarter of one. So a
//! receiver looks first. How long it looks follows what looking brought: a hit doubles
//! the budget, a miss halves it, and now and then a miss tries the full budget again.

/// Most looks: some ten microseconds. None in a model, which tries all interleavings.
const LOOKS_MAX: u32 = if cfg!(loom) { 0 } else { 1024 };
/// Fewest looks.
const LOOKS_MIN: u32 = if cfg!(loom) { 0 } else { 2 };
/// Every so many misses the full budget is tried.
const RETRY_MISSES: u32 = 512;

/// The budget of one receiver.
#[derive(Debug)]
pub(super) struct Spin {
    looks: u32,
    misses: u32,
}

impl Default for Spin {
    fn default() -> Self {
        Self { looks: LOOKS_MAX, misses: 0 }
    }
}

impl Spin {
    pub(super) fn new() -> Self {
        Self::default()
    }

    /// Looks until `there` is true; whether it became so within the budget.
    pub(super) fn until(&mut self, mut there: impl FnMut() -> bool) -> bool {
        for _ in 0..self.looks {
            if there() {
                self.looks = (self.looks * 2).min(LOOKS_MAX);
                return true;
            }
            std::hint::spin_loop();
        }
        self.misses = self.misses.wrapping_add(1);
        let retry = self.misses.is_multiple_of(RETRY_MISSES);
        self.looks = if retry { LOOKS_MAX } else { (self.looks / 2).max(LOOKS_MIN) };
        false
    }
}
