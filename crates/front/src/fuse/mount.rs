//! Attaches FUSE connections to directories, as root or through `fusermount3`.

use std::ffi::{CString, OsStr, OsString};
use std::io::Read;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use draconis_exchange::descriptors;
use draconis_types::AccessTimes;
use draconis_types::path_bytes::ShowPath;
use rustix::fs::{Mode, OFlags};
use rustix::mount::{MountAttrFlags, MountFlags, UnmountFlags};
use rustix::net::RecvFlags;

use super::named_source::{self, NamedMount};

/// Block size of a source device: at least that of any disk.
const FUSEBLK_BLOCK_BYTES: u32 = 4096;

/// Mount options for the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelOptions {
    /// Source shown in `/proc/mounts`.
    pub source: PathBuf,
    /// A block device as the source, opened exclusively by the mount (root only). To such mounts the
    /// kernel passes `sync` and `syncfs` on, and sends FUSE_DESTROY. Where the kernel cannot show
    /// `source` for it, it shows the device.
    pub device: Option<PathBuf>,
    /// Type shown after `fuse.`.
    pub subtype: String,
    /// Security contexts, as `NAME=VALUE`.
    pub contexts: Vec<String>,
    /// Refuse writing already in the kernel.
    pub read_only: bool,
    /// Let other users access the mount.
    pub allow_other: bool,
    /// Let the kernel check permissions by owner and mode.
    pub default_permissions: bool,
    /// Honour device nodes (root only).
    pub dev: bool,
    /// Honour setuid bits (root only).
    pub suid: bool,
    /// Refuse to execute.
    pub no_exec: bool,
    /// How reading updates access times. The server keeps them; the kernel shows this in
    /// `/proc/mounts`.
    pub access_times: AccessTimes,
    /// Have the kernel sync after each write.
    pub sync: bool,
    /// Have the kernel sync after each change of a directory.
    pub dir_sync: bool,
}

/// Errors of mounting and unmounting.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// `/dev/fuse` is missing.
    #[error("/dev/fuse: {}: load the fuse module, or use the commands that need no mount", error_text(.0))]
    NoFuse(rustix::io::Errno),
    /// The kernel refused.
    #[error("{}: {}", .0.shown(), error_text(.1))]
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

/// Mounts a new FUSE connection on `dir` and returns its descriptor, not yet initialised. The
/// connection is that of `device`, an open `/dev/fuse`, if given (root only).
///
/// # Errors
/// See [`MountError`].
pub fn mount(
    dir: &Path,
    device: Option<&OwnedFd>,
    options: &KernelOptions,
) -> Result<OwnedFd, MountError> {
    if rustix::process::geteuid().is_root() {
        mount_as_root(dir, device, options)
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
    match fusermount_error(&output.stderr) {
        _ if output.status.success() => Ok(()),
        // fusermount3 gives no other sign.
        MountError::Helper(text) if text.contains("busy") => Err(MountError::Busy),
        said => Err(said),
    }
}

/// Makes the kernel's mount read-only or writable, as `options.read_only` says; dirty pages are
/// written back first. The other options are those of the mount. Root only.
///
/// # Errors
/// [`MountError::Busy`] while files are open for writing, as for any file system.
pub fn remount(dir: &Path, options: &KernelOptions) -> Result<(), MountError> {
    let remounted = rustix::mount::mount_remount(dir, mount_flags(options), c"");
    remounted.map_err(|errno| match errno {
        rustix::io::Errno::BUSY => MountError::Busy,
        other => MountError::Kernel(dir.into(), other),
    })
}

fn mount_as_root(
    dir: &Path,
    device: Option<&OwnedFd>,
    options: &KernelOptions,
) -> Result<OwnedFd, MountError> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    let fuse = match device {
        Some(device) => rustix::io::fcntl_dupfd_cloexec(device, 0),
        None => rustix::fs::open("/dev/fuse", flags, Mode::empty()),
    };
    let fuse = fuse.map_err(MountError::NoFuse)?;
    let failed = |errno| MountError::Kernel(dir.into(), errno);
    let mode = rustix::fs::stat(dir).map_err(failed)?.st_mode & 0o170000;
    let mut parameters = vec![
        ("fd", fuse.as_raw_fd().to_string()),
        ("rootmode", format!("{mode:o}")),
        ("user_id", "0".to_owned()),
        ("group_id", "0".to_owned()),
    ];
    if options.device.is_some() {
        parameters.push(("blksize", FUSEBLK_BLOCK_BYTES.to_string()));
    }
    // Root's mounts are for all users, as those of any file system.
    let mut flags = vec!["allow_other"];
    flags.extend(options.default_permissions.then_some("default_permissions"));
    let (kind, source) = match &options.device {
        None => ("fuse", &options.source),
        Some(device) => {
            if *device != options.source {
                match create_named(device, options, &parameters, &flags) {
                    Ok(mount) => {
                        named_source::attach(&mount, dir).map_err(failed)?;
                        return Ok(fuse);
                    }
                    Err(errno) => log::debug!(
                        "{}: not shown as the source: {}",
                        options.source.shown(),
                        error_text(&errno)
                    ),
                }
            }
            ("fuseblk", device)
        }
    };
    let parameters = parameters.iter().map(|(name, value)| format!("{name}={value}"));
    let flags = flags.into_iter().map(str::to_owned);
    let data: Vec<String> = parameters.chain(flags).chain(quoted_contexts(options)).collect();
    let data = CString::new(data.join(",")).unwrap_or_default();
    let kind = format!("{kind}.{}", options.subtype);
    rustix::mount::mount(source, dir, kind, mount_flags(options), data.as_c_str())
        .map_err(failed)?;
    Ok(fuse)
}

/// Creates a mount of a block device that the kernel shows as `options.source`.
fn create_named(
    device: &Path,
    options: &KernelOptions,
    parameters: &[(&str, String)],
    flags: &[&str],
) -> rustix::io::Result<OwnedFd> {
    let contexts = options.contexts.iter().filter_map(|context| context.split_once('='));
    let others = [("subtype", options.subtype.as_str())].into_iter().chain(contexts);
    let others = others.map(|(name, value)| (name, value.to_owned()));
    let parameters: Vec<_> = parameters.iter().cloned().chain(others).collect();
    let all = mount_flags(options);
    let mut flags = flags.to_vec();
    let mut attributes = MountAttrFlags::empty();
    for (flag, name) in [
        (MountFlags::RDONLY, "ro"),
        (MountFlags::LAZYTIME, "lazytime"),
        (MountFlags::SYNCHRONOUS, "sync"),
        (MountFlags::DIRSYNC, "dirsync"),
    ] {
        flags.extend(all.contains(flag).then_some(name));
    }
    for (flag, attribute) in [
        (MountFlags::RDONLY, MountAttrFlags::MOUNT_ATTR_RDONLY),
        (MountFlags::NODEV, MountAttrFlags::MOUNT_ATTR_NODEV),
        (MountFlags::NOSUID, MountAttrFlags::MOUNT_ATTR_NOSUID),
        (MountFlags::NOEXEC, MountAttrFlags::MOUNT_ATTR_NOEXEC),
        (MountFlags::NOATIME, MountAttrFlags::MOUNT_ATTR_NOATIME),
        (MountFlags::STRICTATIME, MountAttrFlags::MOUNT_ATTR_STRICTATIME),
    ] {
        attributes.set(attribute, all.contains(flag));
    }
    let source = &options.source;
    NamedMount { source, parameters: &parameters, flags: &flags, attributes }.create(device)
}

fn mount_flags(options: &KernelOptions) -> MountFlags {
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

/// Mounts for ordinary users through `fusermount3`. It passes the descriptor back over the socket
/// that `_FUSE_COMMFD` names, which is its standard input.
fn mount_with_fusermount(dir: &Path, options: &KernelOptions) -> Result<OwnedFd, MountError> {
    let (ours, theirs) = UnixStream::pair().map_err(MountError::NoHelper)?;
    let mut child = Command::new("fusermount3")
        .arg("-o")
        .arg(fusermount_options(options))
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
        // Its messages only improve our error.
        let _ = stderr.read_to_end(&mut said);
    }
    let status = child.wait().map_err(MountError::NoHelper)?;
    match received {
        Some(fuse) if status.success() => Ok(fuse),
        _ => Err(fusermount_error(&said)),
    }
}

/// Returns the system's text, without the error number.
fn error_text(errno: &rustix::io::Errno) -> String {
    let text = std::io::Error::from(*errno).to_string();
    text.split(" (os error ").next().unwrap_or_default().to_string()
}

fn fusermount_error(stderr: &[u8]) -> MountError {
    let text = String::from_utf8_lossy(stderr).trim().to_string();
    MountError::Helper(if text.is_empty() {
        "fusermount3 failed without a word".into()
    } else {
        text
    })
}

fn fusermount_options(options: &KernelOptions) -> OsString {
    let named = |name: &str, value: &OsStr| {
        let mut option = name.as_bytes().to_vec();
        for &byte in value.as_bytes() {
            option.extend(matches!(byte, b',' | b'\\').then_some(b'\\'));
            option.push(byte);
        }
        option
    };
    let mut list = vec![
        named("subtype=", options.subtype.as_ref()),
        named("fsname=", options.source.as_os_str()),
    ];
    list.push(if options.read_only { "ro" } else { "rw" }.into());
    list.extend(quoted_contexts(options).map(String::into_bytes));
    for (wanted, name) in [
        (options.allow_other, "allow_other"),
        (options.default_permissions, "default_permissions"),
        (options.no_exec, "noexec"),
        // The server implements the options that the helper does not know.
        (options.access_times == AccessTimes::Never, "noatime"),
        (options.sync, "sync"),
    ] {
        if wanted {
            list.push(name.into());
        }
    }
    OsString::from_vec(list.join(&b','))
}

/// Returns the contexts as the kernel parses them: in quotes, since categories have commas.
fn quoted_contexts(options: &KernelOptions) -> impl Iterator<Item = String> {
    let named = options.contexts.iter().filter_map(|context| context.split_once('='));
    named.map(|(name, value)| format!("{name}=\"{value}\""))
}

fn receive_descriptor(socket: &UnixStream) -> Option<OwnedFd> {
    let got = descriptors::receive_with_fds(socket, &mut [0], RecvFlags::empty()).ok()?;
    got.fds.into_iter().next()
}

/// Returns the sysfs file with the read-ahead setting, in KiB, of the FUSE mount on `dir`. Sends no
/// request to the mount.
pub fn read_ahead_file(dir: &Path) -> Option<PathBuf> {
    let table = std::fs::read("/proc/self/mountinfo").ok()?;
    let wanted = escape_octal(dir.as_os_str().as_bytes());
    let mut devices = table.split(|&b| b == b'\n').filter_map(|line| {
        // Fields: id, parent, major:minor, root, mount point ... (proc(5))
        let mut fields = line.split(|&b| b == b' ').skip(2);
        let device = fields.next()?;
        (fields.nth(1)? == wanted).then_some(device)
    });
    let device = String::from_utf8(devices.next_back()?.to_vec()).ok()?;
    let names = [device.clone(), format!("{device}-fuseblk")].into_iter();
    let files = names.map(|name| format!("/sys/class/bdi/{name}/read_ahead_kb").into());
    // The plain name may be that of the disk itself: try the longer one first.
    files.rev().find(|file: &PathBuf| file.exists())
}

/// Escapes space, tab, newline and backslash in octal, as the kernel does there.
fn escape_octal(path: &[u8]) -> Vec<u8> {
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
    fn commas_in_source_are_escaped() {
        let options = KernelOptions {
            source: OsStr::from_bytes(b"/a,b\\c\xff").into(),
            device: None,
            subtype: "draconis".into(),
            contexts: vec!["context=system_u:object_r:tmp_t:s0:c1,c2".into()],
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
            fusermount_options(&options).as_bytes(),
            b"subtype=draconis,fsname=/a\\,b\\\\c\xff,ro,\
             context=\"system_u:object_r:tmp_t:s0:c1,c2\",allow_other,noatime"
        );
    }

    #[test]
    fn mount_point_escaping_matches_kernel() {
        assert_eq!(escape_octal(b"/a b\\c\td"), b"/a\\040b\\134c\\011d");
    }
}
