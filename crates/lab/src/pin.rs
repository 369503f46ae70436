//! Pinning a thread to one CPU, so that the scheduler does not move a measurement.

use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};

/// Keeps the calling thread on one CPU until this is dropped. Threads and processes started
/// meanwhile inherit that: start none.
pub struct Pinned(CpuSet);

impl Pinned {
    /// Pins the thread to its current CPU; `None` if that is not permitted.
    pub fn to_this_cpu() -> Option<Self> {
        let before = sched_getaffinity(None).ok()?;
        to(sched_getcpu()).then_some(Self(before))
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _ = sched_setaffinity(None, &self.0);
    }
}

/// Pins the calling thread to a CPU permanently; returns true on success.
pub fn to(cpu: usize) -> bool {
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_ends() {
        let before = sched_getaffinity(None).unwrap();
        let pinned = Pinned::to_this_cpu();
        assert!(pinned.is_none() || sched_getaffinity(None).unwrap().count() == 1);
        drop(pinned);
        assert_eq!(sched_getaffinity(None).unwrap(), before);
    }
}
