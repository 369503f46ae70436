//! The kernel's mount table: mount points, their volumes, and which of them are ours.
//!
//! Law: reading the table sends no request to any mount. [`MountEntry::probe_server`] does, and has a
//! timeout, since a hung worker does not answer.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::time::Duration;

use rustix::io::Errno;

/// File system types of our mounts: of files, and of block devices.
const FUSE_FS_TYPES: [&str; 2] = ["fuse.draconis", "fuseblk.draconis"];
/// Timeout after which a mount counts as silent.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);

/// One line of the table (proc_pid_mountinfo(5)).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountEntry {
    /// Major and minor number, as `0:45`. They are unique among existing mounts.
    pub device: String,
    /// The mount point.
    pub mount_point: PathBuf,
    /// The file system type.
    pub fs_type: String,
    /// The source of the mount.
    pub source: PathBuf,
    /// The user that a FUSE mount belongs to.
    pub user: Option<u32>,
}

/// State of the server of a mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServerState {
    /// It answers.
    Serving,
    /// It has ended.
    Dead,
    /// It did not answer within the timeout.
    Silent,
}

impl MountEntry {
    /// Returns true if this program mounted it, with its default file system type.
    pub fn is_draconis(&self) -> bool {
        FUSE_FS_TYPES.contains(&self.fs_type.as_str())
    }

    /// Returns true if it is a place where autofs mounts something at the first access, and no file
    /// system itself. Others may only go there once that has happened.
    pub fn is_automount_point(&self) -> bool {
        self.fs_type == "autofs"
    }

    /// Returns true if it is a FUSE mount.
    pub fn is_fuse(&self) -> bool {
        ["fuse", "fuseblk"].contains(&self.fs_type.split('.').next().unwrap_or_default())
    }

    /// Returns true if the kernel passes `sync` and `syncfs` on to its server.
    pub fn receives_syncs(&self) -> bool {
        self.fs_type.starts_with("fuseblk")
    }

    /// Returns the mounted volume; for a loop device its backing file.
    pub fn volume(&self) -> PathBuf {
        let name = self.source.strip_prefix("/dev").ok();
        let behind = name.map(|name| Path::new("/sys/block").join(name).join("loop/backing_file"));
        match behind.and_then(|file| std::fs::read(file).ok()) {
            Some(text) => {
                let text = text.trim_ascii_end();
                // A memfd has the name of the volume that it represents.
                let name = text.strip_prefix(b"/memfd:");
                let name = name.and_then(|name| name.strip_suffix(b" (deleted)")).unwrap_or(text);
                OsString::from_vec(name.to_vec()).into()
            }
            None => self.source.clone(),
        }
    }

    /// Calls `statfs` on it, with a timeout.
    pub fn probe_server(&self) -> ServerState {
        let path = self.mount_point.clone();
        let (done, wait) = channel();
        std::thread::spawn(move || {
            // After the timeout nobody receives the answer.
            let _ = done.send(rustix::fs::statfs(&path).err());
        });
        match wait.recv_timeout(PROBE_TIMEOUT) {
            Ok(Some(Errno::NOTCONN | Errno::CONNABORTED)) => ServerState::Dead,
            Ok(_) => ServerState::Serving,
            Err(_) => ServerState::Silent,
        }
    }
}

/// Returns all mounts that this process sees, the latest last.
pub fn read_mounts() -> Vec<MountEntry> {
    read_table("self")
}

/// Returns all mounts that a process sees, if this user may look at it.
pub(crate) fn read_mounts_of(pid: u32) -> Vec<MountEntry> {
    read_table(&pid.to_string())
}

fn read_table(process: &str) -> Vec<MountEntry> {
    let table = std::fs::read(format!("/proc/{process}/mountinfo")).unwrap_or_default();
    table.split(|&b| b == b'\n').filter_map(parse_mountinfo_line).collect()
}

/// Returns the topmost mount at exactly this path.
pub fn find_mount_at(path: &Path) -> Option<MountEntry> {
    read_mounts().into_iter().rfind(|entry| entry.mount_point == path)
}

/// Returns our mounts whose server has ended: those of `user`, or of all users for root. Skips
/// mounts that `is_known` accepts: a probe keeps a mount busy for a moment, and their keepers know
/// their state.
pub fn find_dead_mounts(
    user: rustix::process::Uid,
    is_known: impl Fn(&MountEntry) -> bool,
) -> Vec<MountEntry> {
    let all = read_mounts().into_iter();
    let own =
        all.filter(|it| it.is_draconis() && (user.is_root() || it.user == Some(user.as_raw())));
    own.filter(|entry| !is_known(entry) && entry.probe_server() == ServerState::Dead).collect()
}

fn parse_mountinfo_line(line: &[u8]) -> Option<MountEntry> {
    let text = |field: &[u8]| String::from_utf8_lossy(field).into_owned();
    // Fields: id, parent, major:minor, root, mount point, options, optional fields, a dash, type,
    // source, options of the file system.
    let mut fields = line.split(|&b| b == b' ').skip(2);
    let device = text(fields.next()?);
    let at = unescape_octal(fields.nth(1)?);
    let mut fields = fields.skip_while(|field| *field != b"-").skip(1);
    let (kind, source) = (text(fields.next()?), unescape_octal(fields.next()?));
    let options = text(fields.next().unwrap_or_default());
    let user = options.split(',').find_map(|option| option.strip_prefix("user_id=")?.parse().ok());
    Some(MountEntry { device, mount_point: at, fs_type: kind, source, user })
}

/// Decodes the octal escapes that the kernel writes for space, tab, newline and backslash.
fn unescape_octal(field: &[u8]) -> PathBuf {
    let mut bytes = vec![];
    let mut rest = field;
    while let Some((&byte, after)) = rest.split_first() {
        let octal = |digits: &[u8]| {
            digits.iter().try_fold(0u8, |n, d| {
                n.checked_mul(8)?.checked_add(d.checked_sub(b'0').filter(|d| *d < 8)?)
            })
        };
        match after.get(..3).filter(|_| byte == b'\\').and_then(octal) {
            Some(escaped) => {
                bytes.push(escaped);
                rest = &after[3..];
            }
            None => {
                bytes.push(byte);
                rest = after;
            }
        }
    }
    OsString::from_vec(bytes).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mountinfo_lines_are_parsed() {
        let line = b"131 29 0:45 / /mnt/a\\040b\\134c rw,nosuid shared:7 master:1 - \
            fuse.draconis /srv/my\\040disk.img rw,user_id=1000,group_id=100,allow_other";
        let entry = parse_mountinfo_line(line).unwrap();
        assert_eq!((entry.device.as_str(), entry.user), ("0:45", Some(1000)));
        assert_eq!(entry.mount_point, PathBuf::from("/mnt/a b\\c"));
        assert_eq!(entry.source, PathBuf::from("/srv/my disk.img"));
        assert!(entry.is_draconis() && entry.is_fuse());
        let line = b"29 1 8:1 / / rw - ext4 /dev/root rw";
        assert!(!parse_mountinfo_line(line).unwrap().is_fuse());
        assert_eq!(parse_mountinfo_line(b""), None);
        assert_eq!(parse_mountinfo_line(b"29 1 8:1 / /"), None);
    }

    #[test]
    fn invalid_escapes_are_kept() {
        assert_eq!(unescape_octal(b"/odd\\9\\"), PathBuf::from("/odd\\9\\"));
        assert!(find_mount_at(Path::new("/")).is_some());
    }
}
