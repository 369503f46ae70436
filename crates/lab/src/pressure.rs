//! Memory that does not suffice: for a child of ours alone, never for the machine.
//!
//! A control group with a memory limit, of either version, where this process may make one;
//! else the child pages its own memory out. Which of the two it was is said in the report.

use std::path::{Path, PathBuf};

/// How a child's memory is kept short.
pub enum Pressure {
    /// A group that the child joins.
    Group {
        /// Its directory.
        path: PathBuf,
        /// 1 or 2.
        version: u32,
    },
    /// The child pages out what lies beyond.
    PageOut,
}

/// Where the first version of control groups has its memory.
const V1: &str = "/sys/fs/cgroup/memory";

impl Pressure {
    /// Makes a group that may have `limit` bytes, if that is possible here.
    pub fn new(limit: u64) -> Self {
        let v1 = (PathBuf::from(V1), "memory.limit_in_bytes", 1);
        let v2 = v2_root().map(|root| (root, "memory.max", 2));
        for (root, knob, version) in std::iter::once(v1).chain(v2) {
            let path = root.join(format!("draconis-lab-{}", std::process::id()));
            if std::fs::create_dir(&path).is_err() {
                continue;
            }
            if std::fs::write(path.join(knob), limit.to_string()).is_ok() {
                return Self::Group { path, version };
            }
            let _ = std::fs::remove_dir(&path);
        }
        Self::PageOut
    }

    /// What it is, for the report.
    pub fn describe(&self) -> String {
        match self {
            Self::Group { version, .. } => {
                format!("a child in a memory-limited control group (version {version})")
            }
            Self::PageOut => "a child that pages its own memory out (madvise)".into(),
        }
    }

    /// The group.
    pub fn group(&self) -> Option<&Path> {
        match self {
            Self::Group { path, .. } => Some(path),
            Self::PageOut => None,
        }
    }
}

/// The second version's root, if it has the memory there.
fn v2_root() -> Option<PathBuf> {
    let mounts = std::fs::read_to_string("/proc/mounts").ok()?;
    let line = mounts.lines().find(|line| line.split(' ').nth(2) == Some("cgroup2"))?;
    let root = PathBuf::from(line.split(' ').nth(1)?);
    let controllers = std::fs::read_to_string(root.join("cgroup.subtree_control")).ok()?;
    controllers.split_whitespace().any(|name| name == "memory").then_some(root)
}

impl Drop for Pressure {
    fn drop(&mut self) {
        if let Self::Group { path, .. } = self {
            // Page cache that the group still has goes to its parent.
            let _ = std::fs::remove_dir(path);
        }
    }
}
