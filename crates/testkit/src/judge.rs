//! e2fsprogs: makes volumes, shows them, and judges them.
//!
//! The caller names the options of e2fsck, because they differ: `-fn` only looks, `-fp` repairs
//! what needs no answer, `-fy` repairs all, `-fyD` also indexes directories.

use std::path::Path;
use std::process::{Command, Stdio};

use rustix::process::{Pid, Resource, Rlimit, prlimit};

use crate::report_skipped;

/// Address space of a tool: on some damaged volumes e2fsck would take all memory of the machine.
const MAX_TOOL_BYTES: u64 = 4 << 30;

/// Result of one run of a tool.
#[derive(Debug)]
pub struct ToolRun {
    /// Exit status; `None` after a signal.
    pub status: Option<i32>,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl ToolRun {
    /// Returns both outputs.
    pub fn output(&self) -> String {
        format!("{}{}", self.stdout, self.stderr)
    }

    /// Returns true for exit status 0.
    pub fn is_success(&self) -> bool {
        self.status == Some(0)
    }
}

/// Returns a command that is also found in `/usr/sbin` and `/sbin`.
pub fn tool_command(tool: &str) -> Command {
    let path = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
    let mut command = Command::new(tool);
    command.env("PATH", path);
    command
}

/// Runs a command in at most 4 GiB of address space; an error means that it is not installed.
pub fn try_run(command: &mut Command) -> std::io::Result<ToolRun> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn()?;
    let limit = Rlimit { current: Some(MAX_TOOL_BYTES), maximum: Some(MAX_TOOL_BYTES) };
    // Fails only if it has ended.
    let _ = prlimit(Some(Pid::from_child(&child)), Resource::As, limit);
    let output = child.wait_with_output()?;
    Ok(ToolRun {
        status: output.status.code(),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    })
}

/// Runs a tool on an image, whatever its exit status.
#[track_caller]
fn run_on_image(tool: &str, options: &[&str], image: &Path) -> ToolRun {
    let run = try_run(tool_command(tool).args(options).arg(image));
    run.unwrap_or_else(|error| panic!("{tool} of e2fsprogs is needed: {error}"))
}

/// Runs a tool; `None`, with a message, if it is not installed.
#[track_caller]
pub fn run_tool(tool: &str, arguments: &[&str]) -> Option<String> {
    let run = match try_run(tool_command(tool).args(arguments)) {
        Ok(run) => run,
        Err(error) => {
            report_skipped(format_args!("{tool}: {error}"));
            return None;
        }
    };
    // e2fsck exits with 1 if it changed something.
    let is_changed = (tool, run.status) == ("e2fsck", Some(1));
    assert!(run.is_success() || is_changed, "{tool} {arguments:?}: {}", run.output());
    Some(run.stdout)
}

/// Runs e2fsck, whatever its exit status.
#[track_caller]
pub fn e2fsck(options: &str, image: impl AsRef<Path>) -> ToolRun {
    run_on_image("e2fsck", &[options], image.as_ref())
}

/// Asserts that `e2fsck -fn` finds nothing; returns its output.
#[track_caller]
pub fn assert_fsck_clean(image: impl AsRef<Path>) -> String {
    let run = e2fsck("-fn", image);
    assert!(run.is_success(), "{}", run.output());
    run.stdout
}

/// Asserts that `e2fsck -fp` needs no answer, and leaves the image consistent.
#[track_caller]
pub fn assert_preens(image: impl AsRef<Path>, what: &str) -> String {
    let run = e2fsck("-fp", image);
    assert!(matches!(run.status, Some(0 | 1)), "{what}: {:?}: {}", run.status, run.output());
    run.stdout
}

/// Runs a request of debugfs that only reads.
#[track_caller]
pub fn debugfs(image: impl AsRef<Path>, request: &str) -> String {
    let run = run_on_image("debugfs", &["-R", request], image.as_ref());
    assert!(run.is_success(), "{request}: {}", run.output());
    run.stdout
}

/// Runs a request of debugfs that changes the image.
#[track_caller]
pub fn debugfs_write(image: impl AsRef<Path>, request: &str) -> String {
    let run = run_on_image("debugfs", &["-w", "-R", request], image.as_ref());
    assert!(run.is_success(), "{request}: {}", run.output());
    run.stdout
}

/// Returns the output of dumpe2fs; `-h` shows the superblock only.
#[track_caller]
pub fn dumpe2fs(options: &[&str], image: impl AsRef<Path>) -> String {
    let run = run_on_image("dumpe2fs", options, image.as_ref());
    assert!(run.is_success(), "{}", run.output());
    run.stdout
}

/// Makes a volume of `size`, filled from the files in `from`.
#[track_caller]
pub fn mke2fs(image: &Path, from: Option<&Path>, arguments: &[&str], size: &str) {
    let mut command = tool_command("mke2fs");
    command.args(["-q", "-F"]).args(arguments);
    if let Some(from) = from {
        command.arg("-d").arg(from);
    }
    let run = try_run(command.arg(image).arg(size)).expect("mke2fs of e2fsprogs is needed");
    assert!(run.is_success(), "{}", run.output());
}
