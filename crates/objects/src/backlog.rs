//! Work that is due, spread over the bytes that are written meanwhile.

/// Backlog of a kind of work, in its own unit.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(crate) struct Backlog(f64);

impl Backlog {
    /// Grows by `bytes` out of the `span` within which all of `work` must be done.
    pub fn grow(&mut self, bytes: u64, work: u64, span: u64) {
        self.0 += bytes as f64 * work as f64 / span.max(1) as f64;
    }

    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "the cast rounds down and ends at zero"
    )]
    pub fn due_work(self) -> u64 {
        self.0 as u64
    }

    /// Subtracts work that was done. It may exceed the due work if a step was extended.
    pub fn subtract_done(&mut self, work: u64) {
        self.0 -= work as f64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_work_is_due_after_span() {
        for (work, span, step) in [(1u64, 1u64 << 20, 64u64), (1 << 20, 12 << 20, 100), (7, 5, 1)] {
            let (mut debt, mut done, mut came) = (Backlog::default(), 0, 0);
            while came < span {
                debt.grow(step, work, span);
                came += step;
                let due = debt.due_work();
                debt.subtract_done(due);
                done += due;
                // Never ahead of the bytes, and at most a unit behind.
                let fair = came as f64 * work as f64 / span as f64;
                assert!(done as f64 <= fair + 0.001 && done as f64 > fair - 1.001, "{done} {fair}");
            }
            assert!(done + 1 >= work, "{done} of {work}");
        }
        let mut ahead = Backlog::default();
        ahead.subtract_done(10);
        ahead.grow(5, 10, 10);
        assert_eq!(ahead.due_work(), 0);
        ahead.grow(6, 10, 10);
        assert_eq!(ahead.due_work(), 1);
    }
}
