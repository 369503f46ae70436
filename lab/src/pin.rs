//! Pinning a thread to one CPU, so that the scheduler does not move a measurement.

use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};

/// Keeps the calling thread on one CPU until this is dropped. Threads and processes started
/// meanwhile inherit that: start none.
pub struct PinnedThread(CpuSet);

impl PinnedThread {
    /// Pins the thread to its current CPU; `None` if that is not permitted.
    pub fn pin_to_current_cpu() -> Option<Self> {
        let before = sched_getaffinity(None).ok()?;
        pin_to_cpu(sched_getcpu()).then_some(Self(before))
    }
}

impl Drop for PinnedThread {
    fn drop(&mut self) {
        let _ = sched_setaffinity(None, &self.0);
    }
}

/// Pins the calling thread to a CPU permanently; returns true on success.
pub fn pin_to_cpu(cpu: usize) -> bool {
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pinning_ends_on_drop() {
        let before = sched_getaffinity(None).unwrap();
        let pinned = PinnedThread::pin_to_current_cpu();
        assert!(pinned.is_none() || sched_getaffinity(None).unwrap().count() == 1);
        drop(pinned);
        assert_eq!(sched_getaffinity(None).unwrap(), before);
    }
}
