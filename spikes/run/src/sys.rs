//! System calls that the spike needs: seccomp notifications, another process's memory and files.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

pub const RECV: u64 = 0xC050_2100;
pub const SEND: u64 = 0xC018_2101;
pub const ID_VALID: u64 = 0x4008_2102;
pub const ADDFD: u64 = 0x4018_2103;
pub const SET_FLAGS: u64 = 0x4008_2104;
const PIDFD_THREAD: libc::c_uint = 0o200;

/// `struct seccomp_notif`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Notification {
    pub id: u64,
    pub pid: u32,
    pub flags: u32,
    pub nr: i32,
    pub arch: u32,
    pub ip: u64,
    pub args: [u64; 6],
}

#[repr(C)]
pub struct Response {
    pub id: u64,
    pub val: i64,
    pub error: i32,
    pub flags: u32,
}

#[repr(C)]
pub struct AddFd {
    pub id: u64,
    pub flags: u32,
    pub srcfd: u32,
    pub newfd: u32,
    pub newfd_flags: u32,
}

pub fn errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

/// Returns a result, or the errno.
pub fn check(result: libc::c_long) -> Result<libc::c_long, i32> {
    if result < 0 { Err(errno()) } else { Ok(result) }
}

pub fn ioctl<T>(fd: RawFd, request: u64, arg: *mut T) -> Result<libc::c_long, i32> {
    // SAFETY: callers pass the structure that `request` takes.
    check(libc::c_long::from(unsafe { libc::ioctl(fd, request, arg) }))
}

fn owned(result: libc::c_long) -> Result<OwnedFd, i32> {
    // SAFETY: the call returned a descriptor that nobody else owns.
    check(result).map(|fd| unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}

pub fn pidfd_open(tid: u32) -> Result<OwnedFd, i32> {
    // SAFETY: plain numbers.
    owned(unsafe { libc::syscall(libc::SYS_pidfd_open, tid, PIDFD_THREAD) })
}

/// Returns a duplicate of a descriptor of another process; the open file is shared.
pub fn pidfd_getfd(pidfd: &OwnedFd, fd: RawFd) -> Result<OwnedFd, i32> {
    // SAFETY: plain numbers.
    owned(unsafe { libc::syscall(libc::SYS_pidfd_getfd, pidfd.as_raw_fd(), fd, 0) })
}

pub fn memfd(name: &str) -> Result<OwnedFd, i32> {
    let name = CString::new(name).unwrap_or_default();
    // SAFETY: a C string.
    owned(unsafe { libc::syscall(libc::SYS_memfd_create, name.as_ptr(), libc::MFD_CLOEXEC) })
}

pub fn open_at(dir: RawFd, path: &[u8], flags: i32, mode: u32) -> Result<OwnedFd, i32> {
    let path = CString::new(path).map_err(|_| libc::EINVAL)?;
    // SAFETY: a C string.
    owned(i64::from(unsafe { libc::openat(dir, path.as_ptr(), flags | libc::O_CLOEXEC, mode) }))
}

pub fn fstat(fd: RawFd) -> Result<libc::stat, i32> {
    // SAFETY: zeros are a valid `stat`, which the call fills.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: as above.
    check(i64::from(unsafe { libc::fstat(fd, &mut stat) }))?;
    Ok(stat)
}

pub fn lseek(fd: RawFd, at: i64, whence: i32) -> Result<i64, i32> {
    // SAFETY: plain numbers.
    check(unsafe { libc::lseek(fd, at, whence) })
}

/// Returns true if nobody but the holder of this descriptor has the file open or mapped:
/// the kernel grants a write lease only then.
pub fn is_sole_user(fd: RawFd) -> bool {
    // SAFETY: plain numbers.
    unsafe {
        let granted = libc::fcntl(fd, libc::F_SETLEASE, libc::F_WRLCK) == 0;
        if granted {
            libc::fcntl(fd, libc::F_SETLEASE, libc::F_UNLCK);
        }
        granted
    }
}

pub fn pread(fd: &OwnedFd, at: u64, into: &mut [u8]) -> Result<usize, i32> {
    // SAFETY: `into` is valid for its length.
    let read =
        unsafe { libc::pread(fd.as_raw_fd(), into.as_mut_ptr().cast(), into.len(), at as i64) };
    check(read as i64).map(|read| read as usize)
}

pub fn write_memory(tid: u32, to: u64, bytes: &[u8]) -> Result<(), i32> {
    let local = libc::iovec { iov_base: bytes.as_ptr() as *mut _, iov_len: bytes.len() };
    let remote = libc::iovec { iov_base: to as *mut _, iov_len: bytes.len() };
    // SAFETY: the local part is `bytes`; the kernel checks the remote one.
    let written = unsafe { libc::process_vm_writev(tid as i32, &local, 1, &remote, 1, 0) };
    match check(written as i64)? {
        all if all as usize == bytes.len() => Ok(()),
        _ => Err(libc::EFAULT),
    }
}

/// Returns the bytes of a plain C structure.
pub fn bytes_of<T: Copy>(value: &T) -> &[u8] {
    // SAFETY: only used for `stat`, `statx` and `statfs`, made from zeros: no byte is uninitialised.
    unsafe { std::slice::from_raw_parts((value as *const T).cast(), size_of::<T>()) }
}

pub fn zeroed<T: Copy>() -> T {
    // SAFETY: only used for C structures of numbers.
    unsafe { std::mem::zeroed() }
}

pub fn poll(fd: RawFd, timeout_ms: i32) -> i16 {
    let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: one valid structure.
    unsafe { libc::poll(&mut poll, 1, timeout_ms) };
    poll.revents
}

/// Calls whose notifications the supervisor answers or passes on.
pub const CALLS: &[i64] = &[
    libc::SYS_open,
    libc::SYS_openat,
    libc::SYS_creat,
    libc::SYS_openat2,
    libc::SYS_stat,
    libc::SYS_lstat,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_access,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_readlink,
    libc::SYS_readlinkat,
    libc::SYS_getdents64,
    libc::SYS_mkdir,
    libc::SYS_mkdirat,
    libc::SYS_rmdir,
    libc::SYS_unlink,
    libc::SYS_unlinkat,
    libc::SYS_rename,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_link,
    libc::SYS_linkat,
    libc::SYS_symlink,
    libc::SYS_symlinkat,
    libc::SYS_mknod,
    libc::SYS_mknodat,
    libc::SYS_chmod,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_fchmodat2,
    libc::SYS_chown,
    libc::SYS_lchown,
    libc::SYS_fchown,
    libc::SYS_fchownat,
    libc::SYS_utimensat,
    libc::SYS_utimes,
    libc::SYS_utime,
    libc::SYS_futimesat,
    libc::SYS_chdir,
    libc::SYS_fchdir,
    libc::SYS_umask,
    libc::SYS_statfs,
    libc::SYS_fstatfs,
    libc::SYS_truncate,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_sync,
    libc::SYS_syncfs,
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_inotify_add_watch,
    libc::SYS_getxattr,
    libc::SYS_lgetxattr,
    libc::SYS_fgetxattr,
    libc::SYS_listxattr,
    libc::SYS_llistxattr,
    libc::SYS_flistxattr,
    libc::SYS_setxattr,
    libc::SYS_lsetxattr,
    libc::SYS_fsetxattr,
    libc::SYS_removexattr,
    libc::SYS_lremovexattr,
    libc::SYS_fremovexattr,
];

/// Installs the filter in this process and returns the listener.
pub fn install_filter() -> Result<OwnedFd, i32> {
    const ALLOW: u32 = 0x7FFF_0000;
    const NOTIFY: u32 = 0x7FC0_0000;
    const REFUSE: u32 = 0x0005_0000 | libc::ENOSYS as u32;
    let op = |code: u32, jt: usize, jf: usize, k: u32| libc::sock_filter {
        code: code as u16,
        jt: jt as u8,
        jf: jf as u8,
        k,
    };
    let (load, equal, at_least, ret) = (0x20, 0x15, 0x35, 0x06);
    let n = CALLS.len();
    // Layout: architecture, number, calls, ALLOW, NOTIFY, REFUSE.
    let mut program = vec![op(load, 0, 0, 4), op(equal, 0, n + 5, 0xC000_003E), op(load, 0, 0, 0)];
    program.push(op(at_least, n + 3, 0, 0x4000_0000));
    program.push(op(equal, n + 2, 0, libc::SYS_io_uring_setup as u32));
    for (at, call) in CALLS.iter().enumerate() {
        program.push(op(equal, n - at, 0, *call as u32));
    }
    program.extend([op(ret, 0, 0, ALLOW), op(ret, 0, 0, NOTIFY), op(ret, 0, 0, REFUSE)]);
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // NEW_LISTENER, and WAIT_KILLABLE_RECV: only fatal signals interrupt an accepted call.
    let flags: u64 = 1 << 3 | 1 << 5;
    // SAFETY: a valid program; the process is about to execute another one.
    unsafe {
        check(i64::from(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)))?;
        owned(libc::syscall(libc::SYS_seccomp, 1, flags, &filter))
    }
}

/// Sends a descriptor over a socket.
pub fn send_fd(socket: RawFd, fd: RawFd) -> Result<(), i32> {
    transfer_fd(socket, Some(fd)).map(drop)
}

/// Receives a descriptor from a socket; the errno that the sender failed with otherwise.
pub fn receive_fd(socket: RawFd) -> Result<OwnedFd, i32> {
    // SAFETY: the kernel made the descriptor for this call.
    transfer_fd(socket, None).map(|fd| unsafe { OwnedFd::from_raw_fd(fd) })
}

fn transfer_fd(socket: RawFd, send: Option<RawFd>) -> Result<RawFd, i32> {
    let mut byte = [0u8; 4];
    let mut part = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 4 };
    let mut control = [0u64; 8];
    let mut message: libc::msghdr = zeroed();
    (message.msg_iov, message.msg_iovlen) = (&mut part, 1);
    message.msg_control = control.as_mut_ptr().cast();
    // SAFETY: the buffers above outlive the calls, and hold one control message.
    unsafe {
        message.msg_controllen = libc::CMSG_SPACE(4) as usize;
        if let Some(fd) = send {
            let header = libc::CMSG_FIRSTHDR(&message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(4) as usize;
            *libc::CMSG_DATA(header).cast::<i32>() = fd;
            return check(libc::sendmsg(socket, &message, 0) as i64).map(|_| fd);
        }
        let read = check(libc::recvmsg(socket, &mut message, libc::MSG_CMSG_CLOEXEC) as i64)?;
        let header = libc::CMSG_FIRSTHDR(&message);
        if header.is_null() {
            return Err(if read == 4 { i32::from_ne_bytes(byte) } else { libc::EPIPE });
        }
        Ok(*libc::CMSG_DATA(header).cast::<i32>())
    }
}

/// Waits until `word` is not `last`: in the kernel, or looking.
pub fn wait_change(word: &std::sync::atomic::AtomicU32, last: u32, sleeps: bool) {
    while word.load(std::sync::atomic::Ordering::Acquire) == last {
        if sleeps {
            // SAFETY: a valid word; no timeout.
            unsafe {
                let no_time = std::ptr::null::<libc::timespec>();
                libc::syscall(libc::SYS_futex, word.as_ptr(), 128 | libc::FUTEX_WAIT, last, no_time)
            };
        } else {
            std::hint::spin_loop();
        }
    }
}

pub fn wake(word: &std::sync::atomic::AtomicU32, sleeps: bool) {
    if sleeps {
        // SAFETY: a valid word.
        unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), 128 | libc::FUTEX_WAKE, 1) };
    }
}
