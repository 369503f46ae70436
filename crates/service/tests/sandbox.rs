//! Operations of confined processes: permitted ones, and those that kill. Each attempt runs in its
//! own process.

use std::io::{Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

use draconis_service::sandbox::{SandboxProfile, confine, open_beneath};
use rustix::fs::{AtFlags, CWD, symlinkat, unlinkat};

/// The child's role; only a child has it.
const ROLE_VARIABLE: &str = "DRACONIS_TEST_ROLE";
/// A path for the child.
const PATH_VARIABLE: &str = "DRACONIS_TEST_PATH";

/// Returns a command that runs this test binary as a child, with only the test `child_entry`, and
/// no more environment than a worker has.
fn child_command(role: &str, path: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["child_entry", "--exact", "--nocapture", "--test-threads=1"])
        .env_clear()
        // The harness runs the test in a thread with its own malloc arena; a worker confines itself
        // while it has one thread.
        .env("MALLOC_ARENA_MAX", "1")
        .env(ROLE_VARIABLE, role)
        .env(PATH_VARIABLE, path)
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    command
}

/// Returns the role, in a child.
fn child_role() -> Option<String> {
    std::env::var(ROLE_VARIABLE).ok()
}

/// Returns the path that the child was given.
fn child_path() -> PathBuf {
    std::env::var_os(PATH_VARIABLE).unwrap().into()
}

/// Makes a system call for which there is no suitable safe function.
fn raw_syscall(number: i64, arguments: [i64; 6]) -> std::io::Result<i64> {
    let [a, b, c, d, e, f] = arguments;
    // SAFETY: no argument is a memory address: pointer arguments are null. A call that is not
    // refused ends or duplicates this process, or fails.
    let got = unsafe { libc::syscall(number, a, b, c, d, e, f) };
    if got < 0 { Err(std::io::Error::last_os_error()) } else { Ok(got) }
}

fn syscall_without_arguments(number: i64) {
    let _ = raw_syscall(number, [0; 6]);
}

const PAGE_BYTES: i64 = 4096;
const PROT_READ_EXEC: i64 = (libc::PROT_READ | libc::PROT_EXEC) as i64;
const MAP_PRIVATE_ANONYMOUS: i64 = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as i64;

/// Typical next steps of an attacker in a worker. `Command`s and file operations use the standard
/// library; the rest are raw system calls.
const FORBIDDEN_ATTEMPTS: &[(&str, fn())] = &[
    ("open a file", || drop(std::fs::File::open("/etc/passwd"))),
    ("open its memory", || drop(std::fs::File::options().write(true).open("/proc/self/mem"))),
    #[cfg(target_arch = "x86_64")]
    ("open(2)", || syscall_without_arguments(libc::SYS_open)),
    ("openat2", || syscall_without_arguments(libc::SYS_openat2)),
    ("stat a path", || drop(std::fs::metadata("/etc"))),
    ("list a directory", || drop(std::fs::read_dir("/"))),
    ("unlink", || drop(std::fs::remove_file("/nowhere/at/all"))),
    ("rename", || drop(std::fs::rename("/nowhere/a", "/nowhere/b"))),
    ("make a directory", || drop(std::fs::create_dir("/nowhere/at/all"))),
    ("change directory", || drop(std::env::set_current_dir("/"))),
    ("socket", || drop(std::net::UdpSocket::bind("127.0.0.1:0"))),
    ("unix socket", || drop(std::os::unix::net::UnixStream::connect("/nowhere"))),
    ("socketpair", || drop(std::os::unix::net::UnixStream::pair())),
    ("connect", || syscall_without_arguments(libc::SYS_connect)),
    ("execve", || drop(Command::new("/bin/true").exec())),
    ("execveat", || syscall_without_arguments(libc::SYS_execveat)),
    ("start a program", || drop(Command::new("/bin/true").status())),
    #[cfg(target_arch = "x86_64")]
    ("fork", || syscall_without_arguments(libc::SYS_fork)),
    #[cfg(target_arch = "x86_64")]
    ("vfork", || syscall_without_arguments(libc::SYS_vfork)),
    ("clone without a thread", || {
        drop(raw_syscall(libc::SYS_clone, [libc::SIGCHLD.into(), 0, 0, 0, 0, 0]))
    }),
    ("clone with memory, without a thread", || {
        let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
        drop(raw_syscall(libc::SYS_clone, [flags.into(), 0, 0, 0, 0, 0]));
    }),
    ("io_uring_setup", || syscall_without_arguments(libc::SYS_io_uring_setup)),
    ("io_uring_enter", || syscall_without_arguments(libc::SYS_io_uring_enter)),
    ("io_uring_register", || syscall_without_arguments(libc::SYS_io_uring_register)),
    ("choose another's CPU", || drop(raw_syscall(libc::SYS_sched_setaffinity, [1, 0, 0, 0, 0, 0]))),
    ("map executable memory", || {
        drop(raw_syscall(
            libc::SYS_mmap,
            [0, PAGE_BYTES, PROT_READ_EXEC, MAP_PRIVATE_ANONYMOUS, -1, 0],
        ));
    }),
    ("make memory executable", || {
        drop(raw_syscall(libc::SYS_mprotect, [0, PAGE_BYTES, PROT_READ_EXEC, 0, 0, 0]))
    }),
    ("make memory executable by key", || syscall_without_arguments(libc::SYS_pkey_mprotect)),
    ("memfd", || syscall_without_arguments(libc::SYS_memfd_create)),
    ("ptrace", || syscall_without_arguments(libc::SYS_ptrace)),
    ("read another's memory", || syscall_without_arguments(libc::SYS_process_vm_readv)),
    ("write another's memory", || syscall_without_arguments(libc::SYS_process_vm_writev)),
    ("take another's descriptor", || syscall_without_arguments(libc::SYS_pidfd_getfd)),
    ("kill another process", || {
        // Signal 0, in case it gets through.
        let _ = rustix::process::test_kill_process(rustix::process::Pid::INIT);
    }),
    ("tgkill", || syscall_without_arguments(libc::SYS_tgkill)),
    ("mount", || syscall_without_arguments(libc::SYS_mount)),
    ("unshare", || syscall_without_arguments(libc::SYS_unshare)),
    ("setns", || syscall_without_arguments(libc::SYS_setns)),
    ("chroot", || syscall_without_arguments(libc::SYS_chroot)),
    ("bpf", || syscall_without_arguments(libc::SYS_bpf)),
    ("perf_event_open", || syscall_without_arguments(libc::SYS_perf_event_open)),
    ("userfaultfd", || syscall_without_arguments(libc::SYS_userfaultfd)),
    ("keyctl", || syscall_without_arguments(libc::SYS_keyctl)),
    ("become somebody", || syscall_without_arguments(libc::SYS_setuid)),
    ("raise a limit", || syscall_without_arguments(libc::SYS_prlimit64)),
    ("loosen the filter", || syscall_without_arguments(libc::SYS_seccomp)),
    ("be traceable", || {
        drop(raw_syscall(libc::SYS_prctl, [libc::PR_SET_DUMPABLE.into(), 1, 0, 0, 0, 0]));
    }),
    ("type on a terminal", || {
        drop(raw_syscall(libc::SYS_ioctl, [0, libc::TIOCSTI as i64, 0, 0, 0, 0]))
    }),
    ("own a descriptor's signals", || {
        drop(raw_syscall(libc::SYS_fcntl, [0, libc::F_SETOWN.into(), 1, 0, 0, 0]));
    }),
    ("seal memory", || {
        drop(raw_syscall(libc::SYS_fcntl, [0, libc::F_ADD_SEALS.into(), 1, 0, 0, 0]))
    }),
    #[cfg(target_arch = "x86_64")]
    ("a call of the x32 set", || syscall_without_arguments(libc::SYS_read | 0x4000_0000)),
];

/// The operations that a worker needs.
const ALLOWED_ATTEMPTS: &[(&str, fn())] = &[
    ("nothing", || {}),
    ("read and write", || {
        let mut line = String::new();
        std::io::stdin().read_to_string(&mut line).unwrap();
        assert_eq!(line, "input");
        println!("output");
    }),
    ("threads", || {
        let threads =
            (0..8).map(|i| std::thread::Builder::new().name(format!("t{i}")).spawn(move || i));
        let sum: u32 = threads.map(|thread| thread.unwrap().join().unwrap()).sum();
        assert_eq!(sum, 28);
    }),
    ("much memory", || {
        for _ in 0..4 {
            let many: Vec<_> = (0..64).map(|i| vec![i as u8; 1 << 20]).collect();
            assert_eq!(many[63][1 << 19], 63);
        }
        let thread = std::thread::spawn(|| vec![1u8; 64 << 20].len());
        assert_eq!(thread.join().unwrap(), 64 << 20);
    }),
    ("a panic", || {
        let caught = std::panic::catch_unwind(|| panic!("a panic that is meant"));
        assert!(caught.is_err());
        assert!(std::thread::spawn(|| panic!("another that is meant")).join().is_err());
    }),
    ("time and chance", || {
        draconis_testkit::wait::pause("the call is permitted", std::time::Duration::from_millis(1));
        let _ = std::collections::hash_map::RandomState::new();
        let _ = std::time::SystemTime::now();
    }),
    ("reads that do not wait", || syscall_without_arguments(libc::SYS_preadv2)),
    ("clone3 is unknown", || {
        let error = raw_syscall(libc::SYS_clone3, [0; 6]).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOSYS));
    }),
];

#[test]
fn child_entry() {
    let Some(role) = child_role() else { return };
    let (profile, attempt) = role.split_once(' ').unwrap();
    match profile {
        "worker" => {
            let confinement = confine(&SandboxProfile::Worker, None).unwrap();
            assert!(confinement.seccomp && confinement.no_capabilities);
        }
        "ring-worker" => drop(confine(&SandboxProfile::RingWorker, None).unwrap()),
        "store" => drop(confine(&SandboxProfile::Store, None).unwrap()),
        "export" => drop(confine(&SandboxProfile::Export, None).unwrap()),
        "reader" => drop(confine(&SandboxProfile::Reader, None).unwrap()),
        "bounded" => drop(confine(&SandboxProfile::Worker, Some(64 << 20)).unwrap()),
        "unconfined" => {}
        "remover" => return run_remover_attempt(),
        _ => return run_extractor_attempt(attempt),
    }
    let all = FORBIDDEN_ATTEMPTS.iter().chain(ALLOWED_ATTEMPTS);
    let (_, attempt) = all.into_iter().find(|(name, _)| *name == attempt).unwrap();
    attempt();
    std::process::exit(0);
}

/// Runs a child; returns its exit status and stderr.
fn run_attempt(role: &str, path: &Path) -> (ExitStatus, String) {
    let mut child =
        child_command(role, path).stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // A child that does not read its input may be gone already.
    let _ = child.stdin.take().unwrap().write_all(b"input");
    let output = child.wait_with_output().unwrap();
    (output.status, String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn forbidden_syscalls_kill_process() {
    for profile in ["worker", "ring-worker", "store", "export", "reader"] {
        for (name, _) in FORBIDDEN_ATTEMPTS {
            // Its rings were made, and restricted, before it was confined.
            if (profile, *name) == ("ring-worker", "io_uring_enter") {
                continue;
            }
            let (status, said) = run_attempt(&format!("{profile} {name}"), Path::new(""));
            assert_eq!(status.signal(), Some(libc::SIGSYS), "{profile}: {name}: {status} {said}");
        }
    }
}

#[test]
fn forbidden_syscalls_do_not_kill_unconfined_process() {
    for name in ["open a file", "socket", "start a program", "io_uring_setup", "unlink"] {
        let (status, said) = run_attempt(&format!("unconfined {name}"), Path::new(""));
        assert!(status.success(), "{name}: {status} {said}");
    }
}

#[test]
fn allowed_operations_succeed_in_sandbox() {
    for profile in ["worker", "store", "export", "reader"] {
        for (name, _) in ALLOWED_ATTEMPTS {
            let (status, said) = run_attempt(&format!("{profile} {name}"), Path::new(""));
            assert!(status.success(), "{profile}: {name}: {status} {said}");
        }
    }
}

#[test]
fn allocation_beyond_memory_limit_fails() {
    let (status, said) = run_attempt("bounded nothing", Path::new(""));
    assert!(status.success(), "{status} {said}");
    let (status, said) = run_attempt("bounded much memory", Path::new(""));
    assert!(!status.success() && said.contains("memory allocation of"), "{status} {said}");
}

#[test]
fn extractor_writes_only_in_its_directory() {
    let dir = tempfile::tempdir().unwrap();
    let inside = dir.path().join("inside");
    std::fs::create_dir(&inside).unwrap();
    std::fs::write(dir.path().join("outside"), "secret").unwrap();
    let (status, said) = run_attempt("extractor paths", &inside);
    if status.code() == Some(EXIT_NO_LANDLOCK) {
        draconis_testkit::report_skipped("the extractor's paths: this kernel has no landlock");
        return;
    }
    assert!(status.success(), "{status} {said}");
    assert_eq!(std::fs::read(inside.join("made")).unwrap(), b"made");
    assert_eq!(std::fs::read(dir.path().join("outside")).unwrap(), b"secret");
    for attempt in ["socket", "execve", "io_uring_setup", "ptrace", "map executable memory"] {
        let (status, said) = run_attempt(&format!("extractor {attempt}"), &inside);
        assert_eq!(status.signal(), Some(libc::SIGSYS), "{attempt}: {status} {said}");
    }
}

#[test]
fn remover_removes_files_in_its_directories_alone() {
    let dir = tempfile::tempdir().unwrap();
    let inside = dir.path().join("inside");
    std::fs::create_dir(&inside).unwrap();
    for file in [inside.join("unneeded"), dir.path().join("outside")] {
        std::fs::write(file, "text").unwrap();
    }
    let (status, said) = run_attempt("remover files", &inside);
    if status.code() == Some(EXIT_NO_LANDLOCK) {
        draconis_testkit::report_skipped("the remover's paths: this kernel has no landlock");
        return;
    }
    assert!(status.success(), "{status} {said}");
    assert!(!inside.join("unneeded").exists() && dir.path().join("outside").exists());
}

fn run_remover_attempt() {
    let inside = child_path();
    let beneath = open_beneath(&inside).unwrap();
    let beneath = [std::os::fd::AsFd::as_fd(&beneath)];
    let confinement = confine(&SandboxProfile::Remover { beneath: &beneath }, None).unwrap();
    if confinement.landlock == "none" {
        std::process::exit(EXIT_NO_LANDLOCK);
    }
    let remove = |path: &Path| unlinkat(CWD, path, AtFlags::empty());
    remove(&inside.join("unneeded")).unwrap();
    assert_eq!(remove(&inside.with_file_name("outside")), Err(rustix::io::Errno::ACCESS));
    std::process::exit(0);
}

/// Exit status of a child that could not be tested.
const EXIT_NO_LANDLOCK: i32 = 77;

fn run_extractor_attempt(attempt: &str) {
    let inside = child_path();
    let outside = inside.with_file_name("outside");
    let beneath = open_beneath(&inside).unwrap();
    let profile = SandboxProfile::Extractor { beneath: std::os::fd::AsFd::as_fd(&beneath) };
    let confinement = confine(&profile, None).unwrap();
    if let Some((_, hostile)) = FORBIDDEN_ATTEMPTS.iter().find(|(name, _)| *name == attempt) {
        hostile();
        return;
    }
    if confinement.landlock == "none" {
        std::process::exit(EXIT_NO_LANDLOCK);
    }
    std::fs::write(inside.join("made"), "made").unwrap();
    assert_eq!(std::fs::read(inside.join("made")).unwrap(), b"made");
    let denied = |result: std::io::Result<()>| {
        assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::EACCES));
    };
    denied(std::fs::read(&outside).map(drop));
    denied(std::fs::write(&outside, "changed"));
    denied(std::fs::read("/etc/passwd").map(drop));
    denied(std::fs::read(inside.join("../outside")).map(drop));
    // The profile permits the calls with a directory argument, not their older variants.
    denied(unlinkat(CWD, &outside, AtFlags::empty()).map_err(Into::into));
    denied(std::fs::write(outside.with_file_name("new"), ""));
    // A symlink that leads out of the directory is denied.
    symlinkat(&outside, CWD, inside.join("way out")).unwrap();
    denied(std::fs::read(inside.join("way out")).map(drop));
    std::process::exit(0);
}
