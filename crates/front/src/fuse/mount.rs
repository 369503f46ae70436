//! Attaching a FUSE descriptor to a directory, as root or through `fusermount3`.

use std::ffi::CString;
use std::io::Read;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use draconis_exchange::contract::AccessTimes;
use draconis_exchange::descriptors;
use rustix::fs::{Mode, OFlags};
use rustix::mount::{MountFlags, UnmountFlags};
use rustix::net::RecvFlags;

/// Block size of a device that is a source: no less than that of any disk.
const FUSEBLK_BLOCK_BYTES: u32 = 4096;

/// How to mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelOptions {
    /// What `/proc/mounts` shows as the source.
    pub source: String,
    /// A block device as the source instead, which the mount then has for itself (root only).
    /// To such mounts the kernel passes `sync` and `syncfs` on, and tells them when it goes.
    pub device: Option<PathBuf>,
    /// What it shows as the type, behind `fuse.`.
    pub subtype: String,
    /// Refuse writing in the kernel already.
    pub read_only: bool,
    /// Let users other than the mounting one in.
    pub allow_other: bool,
    /// Let the kernel check permissions by owner and mode.
    pub default_permissions: bool,
    /// Honour device nodes (root only).
    pub dev: bool,
    /// Honour setuid bits (root only).
    pub suid: bool,
    /// Refuse to execute.
    pub no_exec: bool,
    /// What reading does to times of access. It is the server that keeps them; the kernel
    /// shows this in `/proc/mounts`.
    pub access_times: AccessTimes,
    /// Have the kernel wait for the disk after each write.
    pub sync: bool,
    /// And after each change of a directory.
    pub dir_sync: bool,
}

/// Why a directory was not mounted or unmounted.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// `/dev/fuse` is missing.
    #[error("/dev/fuse: {}: load the fuse module, or use the commands that need no mount", error_text(.0))]
    NoFuse(rustix::io::Errno),
    /// The kernel refused.
    #[error("{}: {}", .0.display(), error_text(.1))]
    Kernel(PathBuf, rustix::io::Errno),
    /// It is in use.
    #[error("it is busy")]
    Busy,
    /// `fusermount3` could not be run.
    #[error("cannot run fusermount3 ({0}): install fuse3, or mount as root")]
    NoHelper(std::io::Error),
    /// `fusermount3` refused.
    #[error("{0}")]
    Helper(String),
}

/// Mounts a new FUSE connection on `dir` and returns its descriptor, not yet initialised.
///
/// # Errors
/// See [`MountError`].
pub fn mount(dir: &Path, options: &KernelOptions) -> Result<OwnedFd, MountError> {
    if rustix::process::geteuid().is_root() {
        mount_as_root(dir, options)
    } else {
        mount_with_fusermount(dir, options)
    }
}

/// Unmounts `dir`. With `force` it disappears at once even if it is in use.
///
/// # Errors
/// See [`MountError`]; `EBUSY` while files are open and `force` is not given.
pub fn unmount(dir: &Path, force: bool) -> Result<(), MountError> {
    if rustix::process::geteuid().is_root() {
        let flags = if force { UnmountFlags::DETACH } else { UnmountFlags::empty() };
        let unmounted = rustix::mount::unmount(dir, flags | UnmountFlags::NOFOLLOW);
        return unmounted.map_err(|errno| match errno {
            rustix::io::Errno::BUSY => MountError::Busy,
            other => MountError::Kernel(dir.into(), other),
        });
    }
    let mut command = Command::new("fusermount3");
    command.env("LC_ALL", "C").arg("-u").args(force.then_some("-z")).arg("--").arg(dir);
    let output = command.stdin(Stdio::null()).output().map_err(MountError::NoHelper)?;
    match helper_error(&output.stderr) {
        _ if output.status.success() => Ok(()),
        // By no other sign does it tell.
        MountError::Helper(text) if text.contains("busy") => Err(MountError::Busy),
        said => Err(said),
    }
}

/// Makes a mount read-only, or ends that, as the kernel sees it: what it has not written
/// back yet is written back first. `options` are those of the mount, with `read_only` as it
/// is to be. Only root may.
///
/// # Errors
/// [`MountError::Busy`] while files are open for writing, as for any file system.
pub fn remount(dir: &Path, options: &KernelOptions) -> Result<(), MountError> {
    let remounted = rustix::mount::mount_remount(dir, flags_of(options), c"");
    remounted.map_err(|errno| match errno {
        rustix::io::Errno::BUSY => MountError::Busy,
        other => MountError::Kernel(dir.into(), other),
    })
}

fn mount_as_root(dir: &Path, options: &KernelOptions) -> Result<OwnedFd, MountError> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    let fuse = rustix::fs::open("/dev/fuse", flags, Mode::empty()).map_err(MountError::NoFuse)?;
    let failed = |errno| MountError::Kernel(dir.into(), errno);
    let mode = rustix::fs::stat(dir).map_err(failed)?.st_mode & 0o170000;
    let mut data = format!("fd={},rootmode={mode:o},user_id=0,group_id=0", fuse.as_raw_fd());
    // Root's mounts are for everyone, as those of any file system are.
    data.push_str(",allow_other");
    if options.default_permissions {
        data.push_str(",default_permissions");
    }
    let (kind, source) = match &options.device {
        None => ("fuse", options.source.as_str().into()),
        Some(device) => {
            data.push_str(&format!(",blksize={FUSEBLK_BLOCK_BYTES}"));
            ("fuseblk", device.as_os_str().to_owned())
        }
    };
    let kind = format!("{kind}.{}", options.subtype);
    let data = CString::new(data).unwrap_or_default();
    rustix::mount::mount(&source, dir, kind, flags_of(options), data.as_c_str()).map_err(failed)?;
    Ok(fuse)
}

fn flags_of(options: &KernelOptions) -> MountFlags {
    let mut flags = MountFlags::empty();
    for (wanted, flag) in [
        (options.read_only, MountFlags::RDONLY),
        (!options.dev, MountFlags::NODEV),
        (!options.suid, MountFlags::NOSUID),
        (options.no_exec, MountFlags::NOEXEC),
        (options.access_times == AccessTimes::Never, MountFlags::NOATIME),
        (options.access_times == AccessTimes::Strict, MountFlags::STRICTATIME),
        (options.access_times == AccessTimes::Lazy, MountFlags::LAZYTIME),
        (options.sync, MountFlags::SYNCHRONOUS),
        (options.dir_sync, MountFlags::DIRSYNC),
    ] {
        if wanted {
            flags |= flag;
        }
    }
    flags
}

/// `fusermount3` mounts for ordinary users and passes the descriptor back over the socket
/// that `_FUSE_COMMFD` names; it is given the socket as its standard input.
fn mount_with_fusermount(dir: &Path, options: &KernelOptions) -> Result<OwnedFd, MountError> {
    let (ours, theirs) = UnixStream::pair().map_err(MountError::NoHelper)?;
    let mut child = Command::new("fusermount3")
        .arg("-o")
        .arg(helper_options(options))
        .arg("--")
        .arg(dir)
        .env("_FUSE_COMMFD", "0")
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(MountError::NoHelper)?;
    let received = receive_descriptor(&ours);
    let mut said = vec![];
    if let Some(mut stderr) = child.stderr.take() {
        // What it says only makes our error better.
        let _ = stderr.read_to_end(&mut said);
    }
    let status = child.wait().map_err(MountError::NoHelper)?;
    match received {
        Some(fuse) if status.success() => Ok(fuse),
        _ => Err(helper_error(&said)),
    }
}

/// What the system says, without its number.
fn error_text(errno: &rustix::io::Errno) -> String {
    let text = std::io::Error::from(*errno).to_string();
    text.split(" (os error ").next().unwrap_or_default().to_string()
}

fn helper_error(stderr: &[u8]) -> MountError {
    let text = String::from_utf8_lossy(stderr).trim().to_string();
    MountError::Helper(if text.is_empty() {
        "fusermount3 failed without a word".into()
    } else {
        text
    })
}

fn helper_options(options: &KernelOptions) -> std::ffi::OsString {
    let escaped = |text: &str| -> String {
        text.chars()
            .flat_map(|c| matches!(c, ',' | '\\').then_some('\\').into_iter().chain([c]))
            .collect()
    };
    let mut list = vec![
        format!("subtype={}", escaped(&options.subtype)),
        format!("fsname={}", escaped(&options.source)),
    ];
    list.push(if options.read_only { "ro" } else { "rw" }.into());
    for (wanted, name) in [
        (options.allow_other, "allow_other"),
        (options.default_permissions, "default_permissions"),
        (options.no_exec, "noexec"),
        // What the helper does not know the server does all the same.
        (options.access_times == AccessTimes::Never, "noatime"),
        (options.sync, "sync"),
    ] {
        if wanted {
            list.push(name.into());
        }
    }
    std::ffi::OsStr::from_bytes(list.join(",").as_bytes()).to_os_string()
}

fn receive_descriptor(socket: &UnixStream) -> Option<OwnedFd> {
    let got = descriptors::receive(socket, &mut [0], RecvFlags::empty()).ok()?;
    got.fds.into_iter().next()
}

/// The kernel's read-ahead setting of the FUSE mount on `dir`, a file in sysfs with a
/// number of KiB, found without asking the mount itself anything.
pub fn read_ahead_file(dir: &Path) -> Option<PathBuf> {
    let table = std::fs::read("/proc/self/mountinfo").ok()?;
    let wanted = escape(dir.as_os_str().as_bytes());
    let mut devices = table.split(|&b| b == b'\n').filter_map(|line| {
        // Fields: id, parent, major:minor, root, mount point ... (proc(5))
        let mut fields = line.split(|&b| b == b' ').skip(2);
        let device = fields.next()?;
        (fields.nth(1)? == wanted).then_some(device)
    });
    let device = String::from_utf8(devices.next_back()?.to_vec()).ok()?;
    let names = [device.clone(), format!("{device}-fuseblk")].into_iter();
    let files = names.map(|name| format!("/sys/class/bdi/{name}/read_ahead_kb").into());
    // A disk has settings of its own under the plain name: the longer one first.
    files.rev().find(|file: &PathBuf| file.exists())
}

/// The kernel writes space, tab, newline and backslash in octal there.
fn escape(path: &[u8]) -> Vec<u8> {
    let mut escaped = vec![];
    for &byte in path {
        if matches!(byte, b' ' | b'\t' | b'\n' | b'\\') {
            escaped.extend(format!("\\{byte:03o}").into_bytes());
        } else {
            escaped.push(byte);
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_with_commas_stays_one_option() {
        let options = KernelOptions {
            source: "/a,b\\c".into(),
            device: None,
            subtype: "draconis".into(),
            read_only: true,
            allow_other: true,
            default_permissions: false,
            dev: false,
            suid: false,
            no_exec: false,
            access_times: AccessTimes::Never,
            sync: false,
            dir_sync: true,
        };
        assert_eq!(
            helper_options(&options),
            "subtype=draconis,fsname=/a\\,b\\\\c,ro,allow_other,noatime"
        );
    }

    #[test]
    fn mount_points_are_escaped_as_the_kernel_does() {
        assert_eq!(escape(b"/a b\\c\td"), b"/a\\040b\\134c\\011d");
    }
}
