//! The S3 server of tests.

use std::path::PathBuf;

/// Finds the program where `tools/packages test` installs it, or in PATH.
pub fn find_versitygw() -> Option<PathBuf> {
    let home = std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache"));
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).or(home);
    let built = cache.map(|cache| cache.join("draconis/bin/versitygw"));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut all = std::env::split_paths(&path).map(|dir| dir.join("versitygw")).chain(built);
    all.find(|program| program.is_file())
}
