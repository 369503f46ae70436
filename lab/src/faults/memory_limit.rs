//! Lack of memory: a worker may allocate no more, or the kernel kills it for what it has.

use std::fs;
use std::path::PathBuf;

use anyhow::Context;
use draconis_device::Random;
use rustix::process::{Resource, Rlimit, prlimit};

use super::test_mount::process_id;

/// Memory that a worker may use beyond what it has, in a group of its own.
const GROUP_LIMIT_BYTES: u64 = 256 << 10;

/// Takes memory from the worker `pid`; returns how.
///
/// # Errors
/// This process may neither limit another user's process nor make a control group.
pub(super) fn limit_memory(pid: u32, random: &mut Random) -> anyhow::Result<&'static str> {
    // Less than it has: what it frees and allocates again is its own, more is refused.
    let limit = Rlimit { current: Some(1 << 20), maximum: Some(1 << 20) };
    if random.once_in(2) && prlimit(Some(process_id(pid)?), Resource::Data, limit).is_ok() {
        return Ok("memory: no more is given");
    }
    let group = limited_group().context("a control group with little memory needs root")?;
    fs::write(group.join("cgroup.procs"), pid.to_string()).context("a process's group")?;
    Ok("memory: killed by the kernel")
}

/// Returns a control group whose processes get hardly any memory, if this process may make one. All
/// runs share it: the kernel kills its processes one after the other.
fn limited_group() -> Option<PathBuf> {
    let own = fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = |line: &str| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, path) = (parts.next()?, parts.next()?);
        let path = path.trim_start_matches('/');
        match controllers {
            "" => Some((PathBuf::from("/sys/fs/cgroup"), "memory.max")),
            "memory" => {
                Some((PathBuf::from("/sys/fs/cgroup/memory").join(path), "memory.limit_in_bytes"))
            }
            _ => None,
        }
    };
    own.lines().filter_map(path).find_map(|(parent, limit)| {
        let group = parent.join(format!("draconis-faults-{}", std::process::id()));
        let limit = group.join(limit);
        if !group.is_dir() {
            fs::create_dir(&group).ok()?;
            if fs::write(&limit, GROUP_LIMIT_BYTES.to_string()).is_err() {
                let _ = fs::remove_dir(&group);
                return None;
            }
        }
        limit.exists().then_some(group)
    })
}

/// Removes the control group of this process, if there is one.
pub(super) fn remove_group() {
    if let Some(group) = limited_group() {
        // A process that is just ending keeps it; an empty group costs nothing.
        let _ = fs::remove_dir(group);
    }
}
