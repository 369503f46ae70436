//! Shared code of the suites: starts this test binary again as another process.
#![allow(dead_code, reason = "each test file uses its part")]

use std::path::Path;
use std::process::{Command, Stdio};

/// The child's role; only a child has it.
pub const ROLE_VARIABLE: &str = "DRACONIS_TEST_ROLE";
/// A path for the child.
pub const PATH_VARIABLE: &str = "DRACONIS_TEST_PATH";

/// Returns a command that runs this test binary as a child, with only the test `child_entry`, and
/// no more environment than a worker has.
pub fn child_command(role: &str, path: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["child_entry", "--exact", "--nocapture", "--test-threads=1"])
        .env_clear()
        // The harness runs the test in a thread with its own malloc arena; a worker confines itself
        // while it has one thread.
        .env("MALLOC_ARENA_MAX", "1")
        .env(ROLE_VARIABLE, role)
        .env(PATH_VARIABLE, path)
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    command
}

/// Returns the role, in a child.
pub fn child_role() -> Option<String> {
    std::env::var(ROLE_VARIABLE).ok()
}

/// Returns the path that the child was given.
pub fn child_path() -> std::path::PathBuf {
    std::env::var_os(PATH_VARIABLE).unwrap().into()
}
