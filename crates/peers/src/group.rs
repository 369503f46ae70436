//! Memory that does not suffice, for this process alone.

use std::path::Path;

use anyhow::Context as _;

/// Joins a control group, if there is one to join: what this process and the kernel keep for
/// it from now on counts against its limit.
///
/// # Errors
/// What the system says.
pub fn join(group: Option<&Path>) -> anyhow::Result<()> {
    let Some(group) = group else { return Ok(()) };
    // 0 is the process that writes it.
    std::fs::write(group.join("cgroup.procs"), "0").context("joining the control group")
}
