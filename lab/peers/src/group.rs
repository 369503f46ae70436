//! Memory pressure on this process alone.

use std::path::Path;

use anyhow::Context as _;

/// Joins a control group, if one is given: memory and page cache of this process count
/// against its limit from now on.
///
/// # Errors
/// Joining fails.
pub fn join_cgroup(group: Option<&Path>) -> anyhow::Result<()> {
    let Some(group) = group else { return Ok(()) };
    // 0 means the writing process.
    std::fs::write(group.join("cgroup.procs"), "0").context("joining the control group")
}
