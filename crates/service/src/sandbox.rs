//! Confinement: reduces the rights of a process that parses a volume.
//!
//! ```text
//!   close other descriptors ─ drop groups, user, capabilities ─ limits
//!        ─ no_new_privs ─ landlock (paths, ports, signals) ─ seccomp (kill)
//! ```
//!
//! Law 1: a profile is applied before the first byte of a volume is parsed, while the process has
//! one thread. Threads started later inherit everything.
//! Law 2: seccomp kills the process on any system call that is not listed. No listed call can open,
//! connect, execute, or map memory executable. A ring is made and restricted before, since the
//! filter cannot see its operations: see [`SandboxProfile::RingWorker`].
//! Law 3: [`Confinement`] reports what the kernel could not enforce; nothing is assumed.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetStatus, Scope,
};
use rustix::process::{Resource, Rlimit};
use rustix::thread::{CapabilitySet, CapabilitySets};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen as Len, SeccompCmpOp as Op, SeccompCondition,
    SeccompFilter, SeccompRule,
};
use serde::{Deserialize, Serialize};

use crate::user_namespace;

/// Landlock ABI whose rights are all handled; an older kernel enforces those that it knows.
const LANDLOCK_ABI: ABI = ABI::V6;
/// `nobody`, on every Linux.
const NOBODY_UID: u32 = 65534;

/// Tasks that a confined process still has.
#[derive(Debug)]
pub enum SandboxProfile<'a> {
    /// A worker: reads, writes and waits on its existing descriptors. As root it becomes nobody.
    Worker,
    /// A worker that also serves a mount over rings, which refuse all but FUSE commands. Each
    /// thread may choose its CPU.
    RingWorker,
    /// A process that serves the disks of a store: like a worker, and it accepts sessions.
    Store,
    /// A process that serves disks to clients: like a worker, and it accepts connections on its
    /// listening sockets, punches holes, and waits for its child processes.
    Export,
    /// A tool that reads a volume and writes to its standard output.
    Reader,
    /// A tool that changes a volume and the length of the file that contains it.
    Resizer,
    /// A tool that reads and writes open files, and removes those that it did not need.
    Remover {
        /// The directories of those files.
        beneath: &'a [BorrowedFd<'a>],
    },
    /// A tool that reads a volume and creates files beneath one directory.
    Extractor {
        /// The directory.
        beneath: BorrowedFd<'a>,
    },
}

/// The confinement that was really enforced.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Confinement {
    /// `full`, `partial` (an older kernel) or `none`.
    pub landlock: String,
    /// True if unlisted system calls kill the process.
    pub seccomp: bool,
    /// True if no capability is left.
    pub no_capabilities: bool,
    /// Limit of private memory, in bytes.
    pub memory_limit_bytes: Option<u64>,
}

/// Error of confining a process.
#[derive(Debug, thiserror::Error)]
#[error("cannot confine the process that reads the volume: {step}: {why}")]
pub struct ConfineError {
    step: &'static str,
    why: String,
}

fn step_error<E: std::fmt::Display>(step: &'static str) -> impl Fn(E) -> ConfineError {
    move |why| ConfineError { step, why: why.to_string() }
}

/// Drops all rights that `profile` does not need. `memory_limit_bytes` bounds private memory.
///
/// # Errors
/// If a step fails that every supported kernel has. The caller must then stop.
pub fn confine(
    profile: &SandboxProfile<'_>,
    memory_limit_bytes: Option<u64>,
) -> Result<Confinement, ConfineError> {
    limit_malloc_arenas();
    set_resource_limits(memory_limit_bytes)?;
    if matches!(
        profile,
        SandboxProfile::Worker
            | SandboxProfile::RingWorker
            | SandboxProfile::Store
            | SandboxProfile::Export
    ) {
        become_nobody()?;
    }
    let keep = match profile {
        // `get` as root restores owners, modes and attributes of files.
        SandboxProfile::Extractor { .. } => {
            CapabilitySet::CHOWN
                | CapabilitySet::FOWNER
                | CapabilitySet::FSETID
                | CapabilitySet::MKNOD
                | CapabilitySet::SETFCAP
                | CapabilitySet::SYS_ADMIN
                | CapabilitySet::DAC_OVERRIDE
        }
        _ => CapabilitySet::empty(),
    };
    drop_capabilities(keep)?;
    rustix::thread::set_no_new_privs(true).map_err(step_error("no_new_privs"))?;
    let landlock = restrict_paths(profile)?;
    let program = build_syscall_filter(profile).map_err(step_error("seccomp"))?;
    let no_clone3 = clone3_enosys_filter().map_err(step_error("seccomp"))?;
    seccompiler::apply_filter_all_threads(&no_clone3).map_err(step_error("seccomp"))?;
    seccompiler::apply_filter_all_threads(&program).map_err(step_error("seccomp"))?;
    Ok(Confinement {
        landlock,
        seccomp: true,
        no_capabilities: keep.is_empty(),
        memory_limit_bytes,
    })
}

/// Closes every descriptor except the three standard ones and `keep`.
pub fn close_other_fds(keep: &[BorrowedFd<'_>]) {
    use std::os::fd::AsRawFd;
    let mut keep: Vec<RawFd> = keep.iter().map(|fd| fd.as_raw_fd()).collect();
    keep.sort_unstable();
    let mut from = 3;
    for fd in keep.into_iter().chain([RawFd::MAX]) {
        if fd > from {
            // SAFETY: closes descriptors that nothing in this process owns: the caller has just
            // started and names all that it has. No memory is involved.
            unsafe { libc::syscall(libc::SYS_close_range, from, fd - 1, 0) };
        }
        from = fd.saturating_add(1);
    }
}

/// Freed memory that glibc's allocator keeps, in bytes: returning it and faulting it in again costs
/// more than a fast device's reads.
#[cfg(target_env = "gnu")]
const MALLOC_RETAINED_BYTES: libc::c_int = 16 << 20;

/// Limits glibc to one arena: the others open a file in `/proc` when they shrink, which would be
/// fatal. That arena keeps memory that a cache soon allocates again. A process that starts threads
/// before [`confine`] calls it first.
pub fn limit_malloc_arenas() {
    // SAFETY: `mallopt` takes two integers and touches the allocator's own settings.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
        libc::mallopt(libc::M_MMAP_THRESHOLD, MALLOC_RETAINED_BYTES);
        libc::mallopt(libc::M_TRIM_THRESHOLD, MALLOC_RETAINED_BYTES);
    }
}

fn set_resource_limits(memory_limit_bytes: Option<u64>) -> Result<(), ConfineError> {
    let set = |resource, value| {
        let limit = Rlimit { current: Some(value), maximum: Some(value) };
        rustix::process::setrlimit(resource, limit).map_err(step_error("limits"))
    };
    set(Resource::Core, 0)?;
    match memory_limit_bytes {
        Some(bytes) => set(Resource::Data, bytes),
        None => Ok(()),
    }
}

/// Becomes `nobody`: root without capabilities still owns root's files and processes. Root of a user
/// namespace without a `nobody` is an ordinary user, and stays that.
fn become_nobody() -> Result<(), ConfineError> {
    if !rustix::process::geteuid().is_root() || !user_namespace::can_become(NOBODY_UID) {
        return Ok(());
    }
    let step = "give up root";
    rustix::thread::set_thread_groups(&[]).map_err(step_error(step))?;
    let gid = rustix::process::Gid::from_raw(NOBODY_UID);
    rustix::thread::set_thread_res_gid(gid, gid, gid).map_err(step_error(step))?;
    let uid = rustix::process::Uid::from_raw(NOBODY_UID);
    rustix::thread::set_thread_res_uid(uid, uid, uid).map_err(step_error(step))
}

/// Traces `process` until this one ends, or gets the error that it may not. For tests of the
/// sandbox.
///
/// # Errors
/// The system's error.
pub(crate) fn seize_process(process: rustix::process::Pid) -> std::io::Result<()> {
    let process = process.as_raw_nonzero().get();
    let no_address = std::ptr::null_mut::<libc::c_void>();
    // SAFETY: PTRACE_SEIZE reads no memory: its address must be null, and its data are option bits.
    let result = unsafe { libc::ptrace(libc::PTRACE_SEIZE, process, no_address, no_address) };
    if result < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
}

fn drop_capabilities(effective: CapabilitySet) -> Result<(), ConfineError> {
    let have = rustix::thread::capabilities(None).map_err(step_error("capabilities"))?;
    let effective = have.permitted & effective;
    let sets =
        CapabilitySets { effective, permitted: effective, inheritable: CapabilitySet::empty() };
    rustix::thread::set_capabilities(None, sets).map_err(step_error("capabilities"))
}

fn restrict_paths(profile: &SandboxProfile<'_>) -> Result<String, ConfineError> {
    let step = "landlock";
    let all: BitFlags<AccessFs> = AccessFs::from_all(LANDLOCK_ABI);
    let ruleset = Ruleset::default()
        .handle_access(all)
        .and_then(|rules| rules.handle_access(AccessNet::from_all(LANDLOCK_ABI)))
        .and_then(|rules| rules.scope(Scope::from_all(LANDLOCK_ABI)))
        .and_then(|rules| rules.create())
        .map_err(step_error(step))?;
    let ruleset = match profile {
        SandboxProfile::Extractor { beneath } => {
            let beneath = beneath.try_clone_to_owned().map_err(step_error(step))?;
            let access = all & !BitFlags::from(AccessFs::Execute);
            ruleset
                .add_rule(PathBeneath::new(LandlockFd(beneath), access))
                .map_err(step_error(step))?
        }
        SandboxProfile::Remover { beneath } => {
            let rules = beneath.iter().map(|dir| {
                let dir = LandlockFd(dir.try_clone_to_owned().map_err(step_error(step))?);
                Ok(PathBeneath::new(dir, AccessFs::RemoveFile))
            });
            let rules: Result<Vec<_>, ConfineError> = rules.collect();
            let rules = rules?.into_iter().map(Ok::<_, landlock::RulesetError>);
            ruleset.add_rules(rules).map_err(step_error(step))?
        }
        _ => ruleset,
    };
    let status = ruleset.restrict_self().map_err(step_error(step))?;
    Ok(match status.ruleset {
        RulesetStatus::FullyEnforced => "full",
        RulesetStatus::PartiallyEnforced => "partial",
        RulesetStatus::NotEnforced => "none",
    }
    .to_string())
}

/// Wrapper of a descriptor, for landlock's interface.
struct LandlockFd(OwnedFd);

impl std::os::fd::AsFd for LandlockFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Opens `path` for landlock and [`SandboxProfile::Extractor`].
///
/// # Errors
/// The system's error.
pub fn open_beneath(path: &std::path::Path) -> std::io::Result<OwnedFd> {
    let fd = PathFd::new(path).map_err(std::io::Error::other)?;
    std::os::fd::AsFd::as_fd(&fd).try_clone_to_owned()
}

type SyscallRules = BTreeMap<i64, Vec<SeccompRule>>;

/// System calls that every confined process may use with any arguments: use descriptors, wait, and
/// exit.
const BASE_SYSCALLS: &[i64] = &[
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_preadv2,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_fdatasync,
    libc::SYS_lseek,
    libc::SYS_fstat,
    libc::SYS_close,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_recvfrom,
    libc::SYS_sendto,
    libc::SYS_ppoll,
    libc::SYS_futex,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_brk,
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_sigaltstack,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigreturn,
    libc::SYS_restart_syscall,
    libc::SYS_gettid,
    libc::SYS_getpid,
    libc::SYS_getrandom,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    libc::SYS_exit,
    libc::SYS_exit_group,
];

/// Additional calls of a tool that creates files beneath a directory. Landlock restricts where.
const EXTRACT_SYSCALLS: &[i64] = &[
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_mkdirat,
    libc::SYS_mknodat,
    libc::SYS_symlinkat,
    libc::SYS_linkat,
    libc::SYS_renameat2,
    libc::SYS_unlinkat,
    libc::SYS_readlinkat,
    libc::SYS_getdents64,
    // Checks whether a file to be replaced is in use.
    libc::SYS_flock,
    libc::SYS_ftruncate,
    libc::SYS_fallocate,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_fchown,
    libc::SYS_fchownat,
    libc::SYS_utimensat,
    libc::SYS_fsetxattr,
    libc::SYS_setxattr,
    libc::SYS_lsetxattr,
    libc::SYS_umask,
    libc::SYS_fsync,
];

/// Additional calls of a process that serves disks to clients.
const EXPORT_SYSCALLS: &[i64] =
    &[libc::SYS_accept4, libc::SYS_shutdown, libc::SYS_fallocate, libc::SYS_wait4];

fn build_syscall_filter(profile: &SandboxProfile<'_>) -> Result<BpfProgram, seccompiler::Error> {
    let mut rules: SyscallRules = BASE_SYSCALLS.iter().map(|&call| (call, vec![])).collect();
    #[cfg(target_arch = "x86_64")]
    rules.insert(libc::SYS_poll, vec![]);
    let no_exec = arg_bits_clear(2, libc::PROT_EXEC as u64)?;
    rules.insert(libc::SYS_mmap, vec![SeccompRule::new(vec![no_exec.clone()])?]);
    rules.insert(libc::SYS_mprotect, vec![SeccompRule::new(vec![no_exec])?]);
    let thread = (libc::CLONE_VM | libc::CLONE_THREAD) as u64;
    let thread = SeccompCondition::new(0, Len::Qword, Op::MaskedEq(thread), thread)?;
    rules.insert(libc::SYS_clone, vec![SeccompRule::new(vec![thread])?]);
    // Names of threads and of memory, which make stack traces readable.
    let names = [libc::PR_SET_NAME, libc::PR_SET_VMA];
    let names: Result<Vec<_>, seccompiler::Error> =
        names.iter().map(|&name| arg_equals(0, name as u64)).collect();
    rules.insert(libc::SYS_prctl, names?);
    let mut fcntl =
        vec![libc::F_GETFD, libc::F_SETFD, libc::F_GETFL, libc::F_SETFL, libc::F_DUPFD_CLOEXEC];
    if matches!(profile, SandboxProfile::Store) {
        // Received memory is mapped only if its seals prevent shrinking.
        fcntl.push(libc::F_GET_SEALS);
    }
    let fcntl: Result<Vec<_>, seccompiler::Error> =
        fcntl.iter().map(|&command| arg_equals(1, command as u64)).collect();
    rules.insert(libc::SYS_fcntl, fcntl?);
    rules.insert(libc::SYS_ioctl, terminal_ioctl_rules()?);
    rules.insert(libc::SYS_clone3, vec![]);
    if matches!(profile, SandboxProfile::Extractor { .. }) {
        rules.extend(EXTRACT_SYSCALLS.iter().map(|&call| (call, vec![])));
    }
    if matches!(profile, SandboxProfile::Export) {
        rules.extend(EXPORT_SYSCALLS.iter().map(|&call| (call, vec![])));
    }
    if matches!(profile, SandboxProfile::RingWorker) {
        rules.insert(libc::SYS_io_uring_enter, vec![]);
        rules.insert(libc::SYS_sched_setaffinity, vec![arg_equals(0, 0)?]);
    }
    if matches!(profile, SandboxProfile::Remover { .. }) {
        rules.insert(libc::SYS_unlinkat, vec![]);
    }
    if matches!(profile, SandboxProfile::Resizer) {
        rules.insert(libc::SYS_ftruncate, vec![]);
    }
    Ok(compile_filter(rules, SeccompAction::KillProcess, SeccompAction::Allow)?)
}

/// Allows ioctls that a progress bar needs: whether an output is a terminal, and its width.
#[allow(clippy::unnecessary_cast, reason = "of another type in another C library")]
fn terminal_ioctl_rules() -> Result<Vec<SeccompRule>, seccompiler::Error> {
    [libc::TCGETS, libc::TIOCGWINSZ].iter().map(|&command| arg_equals(1, command as u64)).collect()
}

fn arg_equals(argument: u8, value: u64) -> Result<SeccompRule, seccompiler::Error> {
    let condition = SeccompCondition::new(argument, Len::Dword, Op::Eq, value)?;
    Ok(SeccompRule::new(vec![condition])?)
}

fn arg_bits_clear(argument: u8, mask: u64) -> Result<SeccompCondition, seccompiler::Error> {
    Ok(SeccompCondition::new(argument, Len::Dword, Op::MaskedEq(mask), 0)?)
}

/// Denies `clone3`, whose flags are in memory where no filter can read them. With ENOSYS the C
/// library falls back to `clone`.
fn clone3_enosys_filter() -> Result<BpfProgram, seccompiler::Error> {
    let rules = SyscallRules::from([(libc::SYS_clone3, vec![])]);
    Ok(compile_filter(rules, SeccompAction::Allow, SeccompAction::Errno(libc::ENOSYS as u32))?)
}

fn compile_filter(
    rules: SyscallRules,
    otherwise: SeccompAction,
    on_match: SeccompAction,
) -> Result<BpfProgram, seccompiler::BackendError> {
    let arch = std::env::consts::ARCH.try_into()?;
    SeccompFilter::new(rules, otherwise, on_match, arch)?.try_into()
}
