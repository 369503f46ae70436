//! Current and past activity of a server, for its supervisor.

use std::array;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// The kernel's names of its requests, by opcode (`enum fuse_opcode`).
const OPCODE_NAMES: [&str; 53] = [
    "",
    "lookup",
    "forget",
    "getattr",
    "setattr",
    "readlink",
    "symlink",
    "",
    "mknod",
    "mkdir",
    "unlink",
    "rmdir",
    "rename",
    "link",
    "open",
    "read",
    "write",
    "statfs",
    "release",
    "",
    "fsync",
    "setxattr",
    "getxattr",
    "listxattr",
    "removexattr",
    "flush",
    "init",
    "opendir",
    "readdir",
    "releasedir",
    "fsyncdir",
    "getlk",
    "setlk",
    "setlkw",
    "access",
    "create",
    "interrupt",
    "bmap",
    "destroy",
    "ioctl",
    "poll",
    "notify_reply",
    "batch_forget",
    "fallocate",
    "readdirplus",
    "rename2",
    "lseek",
    "copy_file_range",
    "setupmapping",
    "removemapping",
    "syncfs",
    "tmpfile",
    "statx",
];

/// Number of readers that are told apart.
const READER_SLOTS: usize = 64;

/// Current and past activity of a server, for its supervisor.
#[derive(Debug)]
pub struct Activity {
    start: Instant,
    requests: AtomicU64,
    /// Number of requests by opcode; opcodes without a name are counted under 0.
    by_opcode: [AtomicU64; OPCODE_NAMES.len()],
    /// For each reader the start of its current request, in microseconds since `start`, plus one;
    /// 0 if idle.
    busy_since: [AtomicU64; READER_SLOTS],
}

impl Default for Activity {
    fn default() -> Self {
        Self {
            start: Instant::now(),
            requests: AtomicU64::new(0),
            by_opcode: array::from_fn(|_| AtomicU64::new(0)),
            busy_since: array::from_fn(|_| AtomicU64::new(0)),
        }
    }
}

impl Activity {
    /// Returns the number of answered requests.
    pub fn answered_requests(&self) -> u64 {
        self.requests.load(Relaxed)
    }

    /// Returns the number of requests read by opcode, with the kernel's names in lower case. They
    /// show the cost of a program, since the kernel sends many requests of its own.
    pub fn requests_by_opcode(&self) -> BTreeMap<&'static str, u64> {
        let counted = OPCODE_NAMES.iter().zip(&self.by_opcode);
        let counted = counted.map(|(name, count)| {
            (if name.is_empty() { "other" } else { name }, count.load(Relaxed))
        });
        let mut all = BTreeMap::new();
        for (name, count) in counted.filter(|(_, count)| *count > 0) {
            *all.entry(name).or_default() += count;
        }
        all
    }

    /// Returns the age of the oldest current request; zero when idle. Requests that wait for the disk do
    /// not count: their duration is not the server's fault.
    pub fn current_request_age(&self) -> Duration {
        let busy = self.busy_since.iter().map(|since| since.load(Relaxed)).filter(|it| *it > 0);
        busy.min().map_or(Duration::ZERO, |since| {
            self.start.elapsed().saturating_sub(Duration::from_micros(since - 1))
        })
    }

    pub(super) fn count_opcode(&self, opcode: u32) {
        let count = usize::try_from(opcode).ok().and_then(|opcode| self.by_opcode.get(opcode));
        count.unwrap_or(&self.by_opcode[0]).fetch_add(1, Relaxed);
    }

    /// Records the start of a request of the reader `slot`: 0 for the device file, then the queues.
    pub(super) fn begin_request(&self, slot: usize) {
        let now = self.start.elapsed().as_micros() as u64;
        self.busy_since[slot % READER_SLOTS].store(now + 1, Relaxed);
    }

    pub(super) fn end_request(&self, slot: usize) {
        self.busy_since[slot % READER_SLOTS].store(0, Relaxed);
    }

    pub(super) fn count_reply(&self) {
        self.requests.fetch_add(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_counted_by_opcode_name() {
        let activity = Activity::default();
        for opcode in [1, 1, 52, 7, 4096, u32::MAX] {
            activity.count_opcode(opcode);
        }
        let counted = activity.requests_by_opcode();
        assert_eq!(counted, BTreeMap::from([("lookup", 2), ("other", 3), ("statx", 1)]));
    }
}
