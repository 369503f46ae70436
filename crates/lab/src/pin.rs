//! One CPU for a while: so that a measurement is not moved about.

use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};

/// The calling thread stays on one CPU until this is dropped. Threads and processes that
/// are started meanwhile stay there, too: start none.
pub struct Pinned(CpuSet);

impl Pinned {
    /// Stays where it is now; `None` if that may not be asked for.
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

/// Binds the calling thread to a CPU for good; whether that was possible.
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
