//! Memory pressure on a child process, without affecting the rest of the machine.
//!
//! Uses a control group (v1 or v2) with a memory limit, if this process may create one; else the
//! child pages out its own memory. The report names the method.

use std::path::{Path, PathBuf};

/// Method of memory pressure.
pub enum MemoryPressure {
    /// A control group that the child joins.
    Group {
        /// Directory of the group.
        path: PathBuf,
        /// Version of control groups: 1 or 2.
        version: u32,
    },
    /// The child pages out the memory beyond the limit.
    PageOut,
}

/// Mount point of the memory controller (v1).
const CGROUP_V1_MEMORY_DIR: &str = "/sys/fs/cgroup/memory";

impl MemoryPressure {
    /// Creates a group with a limit of `limit` bytes, if possible.
    pub fn new(limit: u64) -> Self {
        let v1 = (PathBuf::from(CGROUP_V1_MEMORY_DIR), "memory.limit_in_bytes", 1);
        let v2 = cgroup_v2_root().map(|root| (root, "memory.max", 2));
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

    /// Describes the method for the report.
    pub fn describe(&self) -> String {
        match self {
            Self::Group { version, .. } => {
                format!("a child in a memory-limited control group (version {version})")
            }
            Self::PageOut => "a child that pages its own memory out (madvise)".into(),
        }
    }

    /// Returns the control group.
    pub fn cgroup_dir(&self) -> Option<&Path> {
        match self {
            Self::Group { path, .. } => Some(path),
            Self::PageOut => None,
        }
    }
}

/// Returns the root of control groups v2, if it has the memory controller.
fn cgroup_v2_root() -> Option<PathBuf> {
    let mounts = std::fs::read_to_string("/proc/mounts").ok()?;
    let line = mounts.lines().find(|line| line.split(' ').nth(2) == Some("cgroup2"))?;
    let root = PathBuf::from(line.split(' ').nth(1)?);
    let controllers = std::fs::read_to_string(root.join("cgroup.subtree_control")).ok()?;
    controllers.split_whitespace().any(|name| name == "memory").then_some(root)
}

impl Drop for MemoryPressure {
    fn drop(&mut self) {
        if let Self::Group { path, .. } = self {
            // Removing the group charges its remaining page cache to the parent.
            let _ = std::fs::remove_dir(path);
        }
    }
}
