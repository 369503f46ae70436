//! What the suites share: this test binary, started again as another process.
#![allow(dead_code, reason = "each test file uses its part")]

use std::path::Path;
use std::process::{Command, Stdio};

/// What the child is to be; only a child has it.
pub const ROLE: &str = "DRACONIS_TEST_ROLE";
/// A path for it.
pub const PATH: &str = "DRACONIS_TEST_PATH";

/// This test binary as a child that runs the test named `child_entry` and nothing else,
/// with no more environment than a worker has.
pub fn child(role: &str, path: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["child_entry", "--exact", "--nocapture", "--test-threads=1"])
        .env_clear()
        // The harness gives the test a thread, which would have an arena of its own before
        // it is confined; a worker confines itself while it has one thread.
        .env("MALLOC_ARENA_MAX", "1")
        .env(ROLE, role)
        .env(PATH, path)
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    command
}

/// The role, in a child.
pub fn role() -> Option<String> {
    std::env::var(ROLE).ok()
}

/// The path that the child was given.
pub fn path() -> std::path::PathBuf {
    std::env::var_os(PATH).unwrap().into()
}
