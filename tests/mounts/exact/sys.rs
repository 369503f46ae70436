//! Raw system calls: numbers in, a number or an errno out.
//!
//! A library wrapper would check, retry or translate, but the comparison needs the kernel's own
//! result. Raw calls also change the credentials of the calling thread alone. This is the only file
//! of the suite with unsafe code.

use std::ffi::CString;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Result of a call, or its errno.
pub type SyscallResult = Result<i64, i32>;

macro_rules! raw {
    ($number:expr $(, $argument:expr)* $(,)?) => {{
        // SAFETY: every pointer refers to memory that outlives the call and has the size passed
        // with it. The kernel writes only bytes or integers, for which every bit pattern is valid.
        let returned = unsafe { libc::syscall($number $(, SyscallArgument::word($argument))*) };
        if returned == -1 { Err(errno()) } else { Ok(returned) }
    }};
}

/// An argument as a register-wide word, which is also the width on the stack.
trait SyscallArgument {
    fn word(self) -> libc::c_long;
}

macro_rules! words {
    ($($integer:ty),*) => {
        $(impl SyscallArgument for $integer {
            fn word(self) -> libc::c_long {
                self as libc::c_long
            }
        })*
    };
}
words!(i32, u32, i64, u64, usize);

impl<T> SyscallArgument for *const T {
    fn word(self) -> libc::c_long {
        self.expose_provenance() as libc::c_long
    }
}

impl<T> SyscallArgument for *mut T {
    fn word(self) -> libc::c_long {
        self.expose_provenance() as libc::c_long
    }
}

fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

fn path_to_cstring(path: &Path) -> CString {
    // Paths of the suite contain no NUL.
    CString::new(path.as_os_str().as_bytes()).unwrap()
}

fn str_to_cstring(name: &str) -> CString {
    CString::new(name).unwrap()
}

fn into_owned_fd(answer: SyscallResult) -> Result<OwnedFd, i32> {
    // SAFETY: the kernel has just returned this new descriptor.
    answer.map(|fd| unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}

// Files and their contents.

pub fn open(path: &Path, flags: i32, mode: u32) -> Result<OwnedFd, i32> {
    open_at(libc::AT_FDCWD, path, flags, mode)
}

pub fn open_at(dir: RawFd, path: &Path, flags: i32, mode: u32) -> Result<OwnedFd, i32> {
    let flags = flags | libc::O_CLOEXEC;
    into_owned_fd(raw!(libc::SYS_openat, dir, path_to_cstring(path).as_ptr(), flags, mode))
}

pub fn read(fd: &OwnedFd, buffer: &mut [u8]) -> SyscallResult {
    raw!(libc::SYS_read, fd.as_raw_fd(), buffer.as_mut_ptr(), buffer.len())
}

pub fn pread(fd: &OwnedFd, buffer: &mut [u8], at: i64) -> SyscallResult {
    raw!(libc::SYS_pread64, fd.as_raw_fd(), buffer.as_mut_ptr(), buffer.len(), at)
}

pub fn write(fd: &OwnedFd, bytes: &[u8]) -> SyscallResult {
    raw!(libc::SYS_write, fd.as_raw_fd(), bytes.as_ptr(), bytes.len())
}

pub fn pwrite(fd: &OwnedFd, bytes: &[u8], at: i64) -> SyscallResult {
    raw!(libc::SYS_pwrite64, fd.as_raw_fd(), bytes.as_ptr(), bytes.len(), at)
}

/// Calls `pwritev2` with two parts; offset -1 means the file position.
pub fn pwritev2(fd: &OwnedFd, parts: [&[u8]; 2], at: i64, flags: i32) -> SyscallResult {
    let part = |bytes: &[u8]| libc::iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    };
    let parts = parts.map(part);
    raw!(libc::SYS_pwritev2, fd.as_raw_fd(), parts.as_ptr(), 2, at, 0, flags)
}

pub fn seek(fd: &OwnedFd, at: i64, whence: i32) -> SyscallResult {
    raw!(libc::SYS_lseek, fd.as_raw_fd(), at, whence)
}

pub fn ftruncate(fd: &OwnedFd, len: i64) -> SyscallResult {
    raw!(libc::SYS_ftruncate, fd.as_raw_fd(), len)
}

pub fn truncate(path: &Path, len: i64) -> SyscallResult {
    raw!(libc::SYS_truncate, path_to_cstring(path).as_ptr(), len)
}

pub fn fallocate(fd: &OwnedFd, mode: i32, at: i64, len: i64) -> SyscallResult {
    raw!(libc::SYS_fallocate, fd.as_raw_fd(), mode, at, len)
}

pub fn copy_file_range(from: &OwnedFd, to: &OwnedFd, len: usize) -> SyscallResult {
    let none = std::ptr::null_mut::<i64>();
    raw!(libc::SYS_copy_file_range, from.as_raw_fd(), none, to.as_raw_fd(), none, len, 0)
}

pub fn sendfile(from: &OwnedFd, to: &OwnedFd, len: usize) -> SyscallResult {
    let none = std::ptr::null_mut::<i64>();
    raw!(libc::SYS_sendfile, to.as_raw_fd(), from.as_raw_fd(), none, len)
}

pub fn splice(from: &OwnedFd, to: &OwnedFd, len: usize) -> SyscallResult {
    let none = std::ptr::null_mut::<i64>();
    raw!(libc::SYS_splice, from.as_raw_fd(), none, to.as_raw_fd(), none, len, 0)
}

pub fn pipe() -> [OwnedFd; 2] {
    let mut ends = [0; 2];
    raw!(libc::SYS_pipe2, ends.as_mut_ptr(), libc::O_CLOEXEC | libc::O_NONBLOCK).unwrap();
    // SAFETY: the kernel has just returned these new descriptors.
    ends.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Calls `fsync`, `fdatasync` or `syncfs`, by number.
pub fn sync_by_number(number: i64, fd: &OwnedFd) -> SyscallResult {
    raw!(number, fd.as_raw_fd())
}

pub fn flock(fd: &OwnedFd, operation: i32) -> SyscallResult {
    raw!(libc::SYS_flock, fd.as_raw_fd(), operation)
}

/// Calls `F_SETLK` or `F_OFD_SETLK` on the bytes from 10 to 20.
pub fn set_lock(fd: &OwnedFd, command: i32, kind: i32) -> SyscallResult {
    // SAFETY: a struct of integers.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as i16;
    lock.l_start = 10;
    lock.l_len = 10;
    raw!(libc::SYS_fcntl, fd.as_raw_fd(), command, &raw mut lock)
}

/// Returns the names of a directory from its start, through a descriptor that may have listed it.
pub fn list_names(fd: &OwnedFd) -> Result<Vec<String>, i32> {
    seek(fd, 0, libc::SEEK_SET)?;
    let mut found = vec![];
    let mut buffer = vec![0_u8; 32 << 10];
    loop {
        let len =
            raw!(libc::SYS_getdents64, fd.as_raw_fd(), buffer.as_mut_ptr(), buffer.len())? as usize;
        if len == 0 {
            found.sort();
            return Ok(found);
        }
        let mut rest = &buffer[..len];
        while rest.len() > 19 {
            let (size, kind) = (usize::from(u16::from_le_bytes([rest[16], rest[17]])), rest[18]);
            let name = rest[19..size].split(|&byte| byte == 0).next().unwrap_or_default();
            found.push(format!("{}:{kind}", name.escape_ascii()));
            rest = &rest[size..];
        }
    }
}

/// A memory mapping of a file.
pub struct MemoryMapping {
    at: *mut u8,
    len: usize,
}

// SAFETY: a mapping belongs to the process, not to a thread, and has one owner.
unsafe impl Send for MemoryMapping {}

impl MemoryMapping {
    pub fn new(fd: &OwnedFd, len: usize, writable: bool) -> Result<Self, i32> {
        let access = libc::PROT_READ | if writable { libc::PROT_WRITE } else { 0 };
        let none = std::ptr::null_mut::<u8>();
        let at = raw!(libc::SYS_mmap, none, len, access, libc::MAP_SHARED, fd.as_raw_fd(), 0)?;
        Ok(Self { at: std::ptr::with_exposed_provenance_mut(at as usize), len })
    }

    /// Returns the first `len` bytes by a system call: an inaccessible page gives an errno instead
    /// of a signal.
    pub fn read_bytes(&self, len: usize) -> Result<Vec<u8>, i32> {
        assert!(len <= self.len);
        let mut bytes = vec![0_u8; len];
        let own = std::process::id();
        let [to, from] = [bytes.as_mut_ptr(), self.at]
            .map(|at| libc::iovec { iov_base: at.cast(), iov_len: len });
        let read = raw!(libc::SYS_process_vm_readv, own, &raw const to, 1, &raw const from, 1, 0)?;
        if read as usize == len { Ok(bytes) } else { Err(libc::EFAULT) }
    }

    /// Stores bytes by a system call, for the same reason.
    pub fn store_bytes(&mut self, at: usize, bytes: &[u8]) -> SyscallResult {
        assert!(at + bytes.len() <= self.len);
        let [from, to] = pipe();
        write(&to, bytes)?;
        raw!(libc::SYS_read, from.as_raw_fd(), self.at.wrapping_add(at), bytes.len())
    }

    pub fn sync(&self) -> SyscallResult {
        raw!(libc::SYS_msync, self.at, self.len, libc::MS_SYNC)
    }
}

impl Drop for MemoryMapping {
    fn drop(&mut self) {
        let _ = raw!(libc::SYS_munmap, self.at, self.len);
    }
}

// Attributes of files.

pub fn statx(dir: RawFd, path: &Path, flags: i32) -> Result<libc::statx, i32> {
    // SAFETY: a struct of integers.
    let mut seen: libc::statx = unsafe { std::mem::zeroed() };
    let mask = libc::STATX_BASIC_STATS | libc::STATX_BTIME;
    raw!(libc::SYS_statx, dir, path_to_cstring(path).as_ptr(), flags, mask, &raw mut seen)?;
    Ok(seen)
}

pub fn lstat(path: &Path) -> Result<libc::statx, i32> {
    statx(libc::AT_FDCWD, path, libc::AT_SYMLINK_NOFOLLOW)
}

pub fn fstat(fd: &OwnedFd) -> Result<libc::statx, i32> {
    statx(fd.as_raw_fd(), Path::new(""), libc::AT_EMPTY_PATH)
}

pub fn statfs(path: &Path) -> Result<libc::statfs, i32> {
    // SAFETY: a struct of integers.
    let mut seen: libc::statfs = unsafe { std::mem::zeroed() };
    raw!(libc::SYS_statfs, path_to_cstring(path).as_ptr(), &raw mut seen)?;
    Ok(seen)
}

pub fn access(path: &Path, mode: i32, flags: i32) -> SyscallResult {
    raw!(libc::SYS_faccessat2, libc::AT_FDCWD, path_to_cstring(path).as_ptr(), mode, flags)
}

pub fn readlink(path: &Path) -> Result<Vec<u8>, i32> {
    let mut buffer = vec![0_u8; 4096];
    let len = raw!(
        libc::SYS_readlinkat,
        libc::AT_FDCWD,
        path_to_cstring(path).as_ptr(),
        buffer.as_mut_ptr(),
        buffer.len()
    )?;
    buffer.truncate(len as usize);
    Ok(buffer)
}

pub fn chmod(path: &Path, mode: u32) -> SyscallResult {
    raw!(libc::SYS_fchmodat, libc::AT_FDCWD, path_to_cstring(path).as_ptr(), mode)
}

pub fn fchmod(fd: &OwnedFd, mode: u32) -> SyscallResult {
    raw!(libc::SYS_fchmod, fd.as_raw_fd(), mode)
}

/// Sets owner and group; 2³² - 1 leaves one unchanged.
pub fn chown(path: &Path, owner: u32, group: u32, flags: i32) -> SyscallResult {
    raw!(libc::SYS_fchownat, libc::AT_FDCWD, path_to_cstring(path).as_ptr(), owner, group, flags)
}

pub fn fchown(fd: &OwnedFd, owner: u32, group: u32) -> SyscallResult {
    raw!(libc::SYS_fchown, fd.as_raw_fd(), owner, group)
}

/// Sets times in seconds and nanoseconds, including `UTIME_NOW` and `UTIME_OMIT`.
pub fn utimens(path: &Path, times: [(i64, i64); 2], flags: i32) -> SyscallResult {
    let times = times.map(|(tv_sec, tv_nsec)| libc::timespec { tv_sec, tv_nsec });
    raw!(libc::SYS_utimensat, libc::AT_FDCWD, path_to_cstring(path).as_ptr(), times.as_ptr(), flags)
}

pub fn futimens(fd: &OwnedFd, times: [(i64, i64); 2]) -> SyscallResult {
    let times = times.map(|(tv_sec, tv_nsec)| libc::timespec { tv_sec, tv_nsec });
    raw!(libc::SYS_utimensat, fd.as_raw_fd(), std::ptr::null::<u8>(), times.as_ptr(), 0)
}

/// Sets an extended attribute without following links.
pub fn setxattr(path: &Path, name: &str, value: &[u8], flags: i32) -> SyscallResult {
    let (path, name) = (path_to_cstring(path), str_to_cstring(name));
    raw!(libc::SYS_lsetxattr, path.as_ptr(), name.as_ptr(), value.as_ptr(), value.len(), flags)
}

pub fn fsetxattr(fd: &OwnedFd, name: &str, value: &[u8], flags: i32) -> SyscallResult {
    let name = str_to_cstring(name);
    let (at, len) = (value.as_ptr(), value.len());
    raw!(libc::SYS_fsetxattr, fd.as_raw_fd(), name.as_ptr(), at, len, flags)
}

pub fn getxattr(path: &Path, name: &str) -> Result<Vec<u8>, i32> {
    let (path, name, mut value) = (path_to_cstring(path), str_to_cstring(name), vec![0_u8; 8192]);
    let (at, room) = (value.as_mut_ptr(), value.len());
    let len = raw!(libc::SYS_lgetxattr, path.as_ptr(), name.as_ptr(), at, room)?;
    value.truncate(len as usize);
    Ok(value)
}

/// Returns the sorted names of extended attributes.
pub fn listxattr(path: &Path) -> Result<Vec<String>, i32> {
    let (path, mut list) = (path_to_cstring(path), vec![0_u8; 8192]);
    let len = raw!(libc::SYS_llistxattr, path.as_ptr(), list.as_mut_ptr(), list.len())?;
    let names = list[..len as usize].split(|&byte| byte == 0).filter(|name| !name.is_empty());
    let mut names: Vec<_> = names.map(|name| String::from_utf8_lossy(name).into_owned()).collect();
    names.sort();
    Ok(names)
}

pub fn removexattr(path: &Path, name: &str) -> SyscallResult {
    let (path, name) = (path_to_cstring(path), str_to_cstring(name));
    raw!(libc::SYS_lremovexattr, path.as_ptr(), name.as_ptr())
}

const FS_IOC_GETFLAGS: u64 = 0x8008_6601;
const FS_IOC_SETFLAGS: u64 = 0x4008_6602;
const FS_IOC_GETVERSION: u64 = 0x8008_7601;
const FS_IOC_FSGETXATTR: u64 = 0x801c_581f;
const FS_IOC_FSSETXATTR: u64 = 0x401c_5820;

pub fn get_inode_flags(fd: &OwnedFd) -> Result<u32, i32> {
    let mut flags = [0_u32; 2];
    raw!(libc::SYS_ioctl, fd.as_raw_fd(), FS_IOC_GETFLAGS, flags.as_mut_ptr())?;
    Ok(flags[0])
}

pub fn set_inode_flags(fd: &OwnedFd, flags: u32) -> SyscallResult {
    raw!(libc::SYS_ioctl, fd.as_raw_fd(), FS_IOC_SETFLAGS, [flags, 0].as_ptr())
}

pub fn get_version(fd: &OwnedFd) -> SyscallResult {
    raw!(libc::SYS_ioctl, fd.as_raw_fd(), FS_IOC_GETVERSION, [0_u32; 2].as_mut_ptr())
}

/// Returns flags, extent size hint, number of extents, project, CoW hint, and zeros.
pub fn get_fsxattr(fd: &OwnedFd) -> Result<[u32; 7], i32> {
    let mut value = [0; 7];
    raw!(libc::SYS_ioctl, fd.as_raw_fd(), FS_IOC_FSGETXATTR, value.as_mut_ptr())?;
    Ok(value)
}

pub fn set_fsxattr(fd: &OwnedFd, value: [u32; 7]) -> SyscallResult {
    raw!(libc::SYS_ioctl, fd.as_raw_fd(), FS_IOC_FSSETXATTR, value.as_ptr())
}

/// A file handle: length, type, bytes.
pub type FileHandleBytes = [u8; 8 + 128];

pub fn name_to_handle(path: &Path) -> Result<FileHandleBytes, i32> {
    let mut handle: FileHandleBytes = [0; 136];
    handle[..4].copy_from_slice(&128_u32.to_le_bytes());
    let (path, mut mount) = (path_to_cstring(path), 0_i32);
    raw!(
        libc::SYS_name_to_handle_at,
        libc::AT_FDCWD,
        path.as_ptr(),
        handle.as_mut_ptr(),
        &raw mut mount,
        0
    )?;
    Ok(handle)
}

pub fn open_by_handle(
    mount: &OwnedFd,
    handle: &FileHandleBytes,
    flags: i32,
) -> Result<OwnedFd, i32> {
    let flags = flags | libc::O_CLOEXEC;
    into_owned_fd(raw!(libc::SYS_open_by_handle_at, mount.as_raw_fd(), handle.as_ptr(), flags))
}

// Names.

pub fn link(from: &Path, to: &Path, flags: i32) -> SyscallResult {
    let (from, to) = (path_to_cstring(from), path_to_cstring(to));
    let here = libc::AT_FDCWD;
    raw!(libc::SYS_linkat, here, from.as_ptr(), here, to.as_ptr(), flags)
}

pub fn link_fd(fd: &OwnedFd, to: &Path) -> SyscallResult {
    let (from, to) = (path_to_cstring(Path::new("")), path_to_cstring(to));
    let (fd, here) = (fd.as_raw_fd(), libc::AT_FDCWD);
    raw!(libc::SYS_linkat, fd, from.as_ptr(), here, to.as_ptr(), libc::AT_EMPTY_PATH)
}

pub fn symlink(target: &str, path: &Path) -> SyscallResult {
    let target = str_to_cstring(target);
    raw!(libc::SYS_symlinkat, target.as_ptr(), libc::AT_FDCWD, path_to_cstring(path).as_ptr())
}

pub fn unlink(path: &Path, flags: i32) -> SyscallResult {
    raw!(libc::SYS_unlinkat, libc::AT_FDCWD, path_to_cstring(path).as_ptr(), flags)
}

pub fn mkdir(path: &Path, mode: u32) -> SyscallResult {
    raw!(libc::SYS_mkdirat, libc::AT_FDCWD, path_to_cstring(path).as_ptr(), mode)
}

pub fn mknod(path: &Path, mode: u32, device: u32) -> SyscallResult {
    raw!(libc::SYS_mknodat, libc::AT_FDCWD, path_to_cstring(path).as_ptr(), mode, device)
}

pub fn rename(from: &Path, to: &Path, flags: u32) -> SyscallResult {
    let (from, to, here) = (path_to_cstring(from), path_to_cstring(to), libc::AT_FDCWD);
    raw!(libc::SYS_renameat2, here, from.as_ptr(), here, to.as_ptr(), flags)
}

// Credentials.

/// Gives this thread its own umask.
pub fn set_thread_umask(mask: u32) {
    raw!(libc::SYS_unshare, libc::CLONE_FS).unwrap();
    set_umask(mask);
}

pub fn set_umask(mask: u32) {
    raw!(libc::SYS_umask, mask).unwrap();
}

/// Changes this thread to another user with the capabilities `effective`; it can become root
/// again.
pub fn become_user(user: u32, group: u32, groups: &[u32], effective: u64) {
    raw!(libc::SYS_setgroups, groups.len(), groups.as_ptr()).unwrap();
    raw!(libc::SYS_setresgid, group, group, group).unwrap();
    raw!(libc::SYS_setresuid, user, user, 0).unwrap();
    if effective != 0 {
        let header = [0x2008_0522_u32, 0];
        let mut sets = [0_u32; 6];
        raw!(libc::SYS_capget, header.as_ptr(), sets.as_mut_ptr()).unwrap();
        (sets[0], sets[3]) = (effective as u32, (effective >> 32) as u32);
        raw!(libc::SYS_capset, header.as_ptr(), sets.as_ptr()).unwrap();
    }
}

pub fn become_root() {
    raw!(libc::SYS_setresuid, 0, 0, 0).unwrap();
    raw!(libc::SYS_setresgid, 0, 0, 0).unwrap();
    raw!(libc::SYS_setgroups, 0, std::ptr::null::<u32>()).unwrap();
}

/// Returns the name of an errno.
pub fn errno_name(errno: i32) -> String {
    let known = [
        (libc::EPERM, "EPERM"),
        (libc::ENOENT, "ENOENT"),
        (libc::EIO, "EIO"),
        (libc::ENXIO, "ENXIO"),
        (libc::EBADF, "EBADF"),
        (libc::EAGAIN, "EAGAIN"),
        (libc::ENOMEM, "ENOMEM"),
        (libc::EACCES, "EACCES"),
        (libc::EBUSY, "EBUSY"),
        (libc::EEXIST, "EEXIST"),
        (libc::EXDEV, "EXDEV"),
        (libc::ENODEV, "ENODEV"),
        (libc::ENOTDIR, "ENOTDIR"),
        (libc::EISDIR, "EISDIR"),
        (libc::EINVAL, "EINVAL"),
        (libc::ENOTTY, "ENOTTY"),
        (libc::ETXTBSY, "ETXTBSY"),
        (libc::EFBIG, "EFBIG"),
        (libc::ENOSPC, "ENOSPC"),
        (libc::ESPIPE, "ESPIPE"),
        (libc::EROFS, "EROFS"),
        (libc::EMLINK, "EMLINK"),
        (libc::EPIPE, "EPIPE"),
        (libc::ERANGE, "ERANGE"),
        (libc::ENAMETOOLONG, "ENAMETOOLONG"),
        (libc::ENOSYS, "ENOSYS"),
        (libc::ENOTEMPTY, "ENOTEMPTY"),
        (libc::ELOOP, "ELOOP"),
        (libc::ENODATA, "ENODATA"),
        (libc::EOVERFLOW, "EOVERFLOW"),
        (libc::EOPNOTSUPP, "EOPNOTSUPP"),
        (libc::ESTALE, "ESTALE"),
        (libc::ENOTCONN, "ENOTCONN"),
    ];
    known.iter().find(|known| known.0 == errno).map_or(errno.to_string(), |known| known.1.into())
}

/// A context of asynchronous I/O (`io_setup`).
pub struct AioContext(u64);

impl AioContext {
    pub fn new(room: usize) -> Self {
        let mut context = 0_u64;
        raw!(libc::SYS_io_setup, room, &raw mut context).unwrap();
        Self(context)
    }

    /// Writes blocks with several requests in flight, and waits for all; returns the sum of their
    /// results.
    pub fn write(&self, fd: &OwnedFd, blocks: &[(&[u8], i64)]) -> SyscallResult {
        const IOCB_CMD_PWRITE: u16 = 1;
        // As `struct iocb`: data, key, flags, opcode, priority, descriptor, buffer, length, offset,
        // and unused fields.
        let requests: Vec<[u64; 8]> = blocks
            .iter()
            .map(|(block, at)| {
                let about = u64::from(IOCB_CMD_PWRITE) | (fd.as_raw_fd() as u64) << 32;
                let buffer = block.as_ptr().expose_provenance() as u64;
                [0, 0, about, buffer, block.len() as u64, *at as u64, 0, 0]
            })
            .collect();
        let pointers: Vec<*const [u64; 8]> =
            requests.iter().map(|request| request as *const [u64; 8]).collect();
        let given = raw!(libc::SYS_io_submit, self.0, pointers.len(), pointers.as_ptr())? as usize;
        let mut events = vec![[0_u64; 4]; given];
        let mut written = 0;
        while !events.is_empty() {
            let none = std::ptr::null::<u8>();
            let room = events.len();
            // EINTR of the wait is not a result of a write.
            let done = loop {
                match raw!(libc::SYS_io_getevents, self.0, room, room, events.as_mut_ptr(), none) {
                    Err(libc::EINTR) => {}
                    done => break done?,
                }
            };
            for event in &events[..done as usize] {
                let returned = event[2] as i64;
                if returned < 0 {
                    return Err(-returned as i32);
                }
                written += returned;
            }
            events.truncate(room - done as usize);
        }
        if given == blocks.len() { Ok(written) } else { Err(libc::EAGAIN) }
    }
}

impl Drop for AioContext {
    fn drop(&mut self) {
        let _ = raw!(libc::SYS_io_destroy, self.0);
    }
}
