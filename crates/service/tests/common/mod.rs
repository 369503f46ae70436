//! Shared code of the suites: starts this test binary again as another process.
#![allow(dead_code, reason = "each test file uses its part")]

use std::path::Path;
use std::process::{Command, Stdio};

/// The child's role; only a child has it.
pub const ROLE: &str = "DRACONIS_TEST_ROLE";
/// A path for the child.
pub const PATH: &str = "DRACONIS_TEST_PATH";

/// Returns a command that runs this test binary as a child, with only the test `child_entry`, and
/// no more environment than a worker has.
pub fn child(role: &str, path: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["child_entry", "--exact", "--nocapture", "--test-threads=1"])
        .env_clear()
        // The harness runs the test in a thread with its own malloc arena; a worker confines itself
        // while it has one thread.
        .env("MALLOC_ARENA_MAX", "1")
        .env(ROLE, role)
        .env(PATH, path)
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    command
}

/// Returns the role, in a child.
pub fn role() -> Option<String> {
    std::env::var(ROLE).ok()
}

/// Returns the path that the child was given.
pub fn path() -> std::path::PathBuf {
    std::env::var_os(PATH).unwrap().into()
}
