//! Temporary files beside the image that is written.

use std::fs::File;
use std::path::Path;

use anyhow::Context;
use draconis_types::path_bytes::ShowPath;
use rustix::fs::{Mode, OFlags};

/// Creates an unnamed file in the directory of `beside`; closing deletes it.
pub fn temporary_file(beside: &Path) -> anyhow::Result<File> {
    let dir = match beside.parent() {
        Some(dir) if dir.starts_with("/dev") => std::env::temp_dir(),
        Some(dir) if !dir.as_os_str().is_empty() => dir.to_path_buf(),
        _ => ".".into(),
    };
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let private = Mode::from_raw_mode(0o600);
    let made = rustix::fs::open(&dir, flags, private)
        .or_else(|_| rustix::fs::open(std::env::temp_dir(), flags, private));
    Ok(made.with_context(|| format!("{}: no room to unpack it", dir.shown()))?.into())
}
