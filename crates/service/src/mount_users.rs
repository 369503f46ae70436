//! Processes and mounts that keep a mount busy, as far as the caller may see them.
//!
//! Law: the work is bounded, and no request is sent to any mount. Only links and tables of `/proc`
//! are read, which name paths and devices.

use std::path::Path;

use draconis_types::path_bytes::ShowPath;

use crate::mount_table::{self, MountEntry};

/// Maximum number of processes that are examined.
const MAX_SCANNED_PROCESSES: usize = 1 << 15;
/// Maximum number of descriptors examined per process.
const MAX_SCANNED_FDS: usize = 4096;
/// Maximum size of a process's table of mappings, in bytes.
const MAX_MAPS_BYTES: usize = 4 << 20;
/// Maximum number of users that are named.
const MAX_LISTED_USERS: usize = 8;

/// Describes the users of `mount`, as the end of a sentence.
pub(crate) fn describe_mount_users(mount: &MountEntry) -> String {
    let mut said: Vec<String> = processes_using(mount);
    let more = said.len().saturating_sub(MAX_LISTED_USERS);
    said.truncate(MAX_LISTED_USERS);
    if more > 0 {
        said.push(format!("{more} more"));
    }
    said.extend(nested_mounts(mount).into_iter().take(MAX_LISTED_USERS));
    if said.is_empty() {
        return "something that this user may not see uses it".into();
    }
    format!("it is used by {}", said.join(", "))
}

/// Returns all visible users that keep `mount` from being unmounted. Invisible ones are usually
/// gone in a moment: a file that the kernel is about to close.
pub(crate) fn find_mount_users(mount: &MountEntry) -> Vec<String> {
    [processes_using(mount), nested_mounts(mount)].concat()
}

fn nested_mounts(mount: &MountEntry) -> Vec<String> {
    let below = mount_table::read_mounts().into_iter();
    let below = below.filter(|it| {
        it.mount_point != mount.mount_point && it.mount_point.starts_with(&mount.mount_point)
    });
    below.map(|it| format!("what is mounted on {}", it.mount_point.shown())).collect()
}

fn processes_using(mount: &MountEntry) -> Vec<String> {
    let Ok(all) = std::fs::read_dir("/proc") else { return vec![] };
    let mut found = vec![];
    for process in all.flatten().take(MAX_SCANNED_PROCESSES) {
        let name = process.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        let dir = process.path();
        if process_uses_mount(&dir, mount) {
            found.push(format!("process {pid} ({})", command_name(pid)));
        }
    }
    found
}

/// Returns the name of the program that a process runs.
pub(crate) fn command_name(pid: u32) -> String {
    let command = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    command.trim().chars().filter(|c| !c.is_control()).collect()
}

fn process_uses_mount(process: &Path, mount: &MountEntry) -> bool {
    let leads_there = |link: &Path| {
        std::fs::read_link(link).is_ok_and(|target| target.starts_with(&mount.mount_point))
    };
    if ["cwd", "root", "exe"].iter().any(|link| leads_there(&process.join(link))) {
        return true;
    }
    let descriptors = std::fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
    if descriptors.take(MAX_SCANNED_FDS).any(|entry| leads_there(&entry.path())) {
        return true;
    }
    read_maps(process)
        .is_some_and(|table| table.split(|&b| b == b'\n').any(|line| is_mapping_of(line, mount)))
}

/// Parses a line of `/proc/PID/maps`: addresses, permissions, offset, device in hexadecimal, inode,
/// path.
fn is_mapping_of(line: &[u8], mount: &MountEntry) -> bool {
    let mut fields = line.split(|&b| b == b' ').filter(|field| !field.is_empty()).skip(3);
    let device = fields.next().and_then(|field| mapping_device(std::str::from_utf8(field).ok()?));
    device.is_some_and(|device| device == mount.device)
}

fn mapping_device(field: &str) -> Option<String> {
    let (major, minor) = field.split_once(':')?;
    let number = |digits| u32::from_str_radix(digits, 16).ok();
    Some(format!("{}:{}", number(major)?, number(minor)?))
}

fn read_maps(process: &Path) -> Option<Vec<u8>> {
    use std::io::Read;
    let mut table = vec![];
    let file = std::fs::File::open(process.join("maps")).ok()?;
    file.take(MAX_MAPS_BYTES as u64).read_to_end(&mut table).ok()?;
    Some(table)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_are_matched_by_device() {
        let mount = MountEntry {
            device: "0:45".into(),
            mount_point: "/mnt/a".into(),
            fs_type: "fuse.draconis".into(),
            source: "x".into(),
            user: None,
        };
        let line = b"7f0000-7f1000 r--p 00000000 00:2d 12      /mnt/a/lib.so";
        assert!(is_mapping_of(line, &mount));
        assert!(!is_mapping_of(&line.map(|b| if b == b'd' { b'c' } else { b }), &mount));
        assert!(!is_mapping_of(b"7f0000-7f1000 rw-p 00000000 00:00 0", &mount));
    }

    #[test]
    fn process_with_cwd_in_mount_is_listed() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().canonicalize().unwrap();
        let mount = MountEntry {
            device: "0:1048575".into(),
            mount_point: dir.clone(),
            fs_type: String::new(),
            source: "x".into(),
            user: None,
        };
        assert!(describe_mount_users(&mount).contains("may not see"));
        let mut child =
            std::process::Command::new("sleep").arg("1000").current_dir(&dir).spawn().unwrap();
        let said = describe_mount_users(&mount);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(said.contains(&format!("process {} (sleep)", child.id())), "{said}");
    }
}
