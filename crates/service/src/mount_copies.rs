//! Copies of a mount: bind mounts of it, and those that other mount namespaces have. The kernel
//! keeps its file system until the last one ends.
//!
//! Law: only tables and links of `/proc` are read; no request is sent to any mount.

use std::collections::BTreeMap;

use draconis_types::path_bytes::ShowPath;

use crate::mount_namespace;
use crate::mount_table;
use crate::mount_users::command_name;

/// Maximum number of processes that are examined.
const MAX_SCANNED_PROCESSES: usize = 1 << 15;

/// Returns the visible copies of the mount with the kernel's number `device`, each as a part of a
/// sentence. A copy of a namespace is that of its first process: it ends with the last one.
pub(crate) fn find_copies(device: &str) -> Vec<String> {
    let own = mount_table::read_mounts().into_iter().filter(|entry| entry.device == device);
    let mut copies: Vec<_> =
        own.map(|entry| format!("a mount on {}", entry.mount_point.shown())).collect();
    for (namespace, pid) in namespaces() {
        let mut mounts = mount_table::read_mounts_of(pid).into_iter();
        if namespace != mount_namespace::own_namespace()
            && mounts.any(|entry| entry.device == device)
        {
            let command = command_name(pid);
            copies.push(format!("the mount namespace of process {pid} ({command})"));
        }
    }
    copies
}

/// Returns the visible namespaces, each with its first process.
fn namespaces() -> BTreeMap<u64, u32> {
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pid = |name: std::ffi::OsString| name.to_str()?.parse::<u32>().ok();
    let mut pids: Vec<u32> = processes.filter_map(|process| pid(process.file_name())).collect();
    pids.sort_unstable();
    let mut found = BTreeMap::new();
    for pid in pids.into_iter().take(MAX_SCANNED_PROCESSES) {
        if let Some(namespace) = mount_namespace::namespace_of(pid) {
            found.entry(namespace).or_insert(pid);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_of_this_namespace_are_found() {
        let root = mount_table::find_mount_at(std::path::Path::new("/")).unwrap();
        assert!(find_copies(&root.device).contains(&"a mount on /".to_string()));
        assert!(find_copies("0:1048575").is_empty());
        assert!(namespaces().contains_key(&mount_namespace::own_namespace()));
    }
}
