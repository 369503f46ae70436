//! A spike, not a product: programs that use a volume without FUSE and without privilege.
//!
//! ```text
//!   draconis-run [-w] IMAGE [--at PATH] -- COMMAND
//!
//!   COMMAND and its children ── path calls ──▶ seccomp listener ──▶ this process ──▶ ext::Volume
//!        ▲                                                               │
//!        └──── memfds and stand-in directories (ADDFD), results ─────────┘
//! ```
//! It lacks: a confined worker (the volume is opened in the supervisor itself), a limit on what a
//! large file costs in memory, O_TMPFILE, fifos and sockets in the volume, inotify, O_SYNC,
//! RESOLVE_* of openat2, links of the host that lead into the volume, access times, programs of
//! other architectures, and recovery of what was acknowledged when the supervisor is killed.
//! One thread answers all calls.

mod calls;
mod files;
mod supervisor;
mod sys;
mod tree;

use std::ffi::CString;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use draconis_ext::{
    AccessTimes, Disk, FileDisk, FileOptions, OpenOptions, Time, Volume, WriteOptions,
};

use crate::supervisor::{Supervisor, Worker};
use crate::tree::Tree;

const COMMIT_EVERY: Duration = Duration::from_millis(100);

struct Arguments {
    image: PathBuf,
    at: PathBuf,
    write: bool,
    statistics: bool,
    worker: Option<bool>,
    command: Vec<CString>,
}

fn main() {
    std::process::exit(match parse().and_then(|arguments| run(&arguments)) {
        Ok(code) => code,
        Err(why) => {
            eprintln!("draconis-run: {why}");
            125
        }
    });
}

fn parse() -> Result<Arguments, String> {
    let usage = "usage: draconis-run [-w] [--statistics] [--worker=asleep|awake] IMAGE [--at DIRECTORY] -- COMMAND";
    let mut given = std::env::args_os().skip(1);
    let (mut image, mut at, mut write, mut statistics) = (None, None, false, false);
    let mut worker = None;
    loop {
        let Some(argument) = given.next() else { return Err(usage.into()) };
        match argument.as_bytes() {
            b"--" => break,
            b"-w" => write = true,
            b"--statistics" => statistics = true,
            b"--worker=asleep" => worker = Some(true),
            b"--worker=awake" => worker = Some(false),
            b"--at" => at = given.next(),
            _ => image = Some(argument.into()),
        }
    }
    let command: Result<Vec<_>, _> = given.map(|word| CString::new(word.as_bytes())).collect();
    let command = command.map_err(|error| error.to_string())?;
    let image = image.ok_or(usage)?;
    if command.is_empty() {
        return Err(usage.into());
    }
    let at = at.map_or_else(
        || std::env::temp_dir().join(format!("draconis-run.{}", std::process::id())),
        PathBuf::from,
    );
    Ok(Arguments { image, at, write, statistics, worker, command })
}

fn run(arguments: &Arguments) -> Result<i32, String> {
    let is_made = !arguments.at.exists();
    std::fs::create_dir_all(&arguments.at)
        .map_err(|error| format!("{}: {error}", arguments.at.display()))?;
    let at = tree::canonical(&arguments.at).map_err(|error| error.to_string())?;
    if std::fs::read_dir(&at).is_ok_and(|mut held| held.next().is_some()) {
        return Err(format!("{}: is not empty; name an empty directory with --at", at.display()));
    }
    let (child, socket) = start(&arguments.command)?;
    let volume = Arc::new(open(arguments)?);
    let listener = listen(&socket)?;
    let fail = |error: i32| std::io::Error::from_raw_os_error(error).to_string();
    let tree = Tree::new(Arc::clone(&volume), at.as_os_str().as_bytes().to_vec()).map_err(fail)?;
    let mut supervisor = Supervisor::new(listener, tree, arguments.write).map_err(fail)?;
    supervisor.worker = arguments.worker.map(Worker::start);
    if arguments.write {
        let volume = Arc::clone(&volume);
        std::thread::spawn(move || {
            loop {
                std::thread::sleep(COMMIT_EVERY);
                if volume.uncommitted_changes().is_some()
                    && let Err(error) = volume.commit()
                {
                    eprintln!("draconis-run: {error}");
                }
            }
        });
    }
    let code = serve(&mut supervisor, child);
    // The stand-ins go, a directory that was there stays.
    let _ = std::fs::remove_dir_all(&at);
    if !is_made {
        let _ = std::fs::create_dir(&at);
    }
    if arguments.write {
        supervisor.files.write_back_all(&volume).map_err(fail)?;
        volume.close().map_err(|error| error.to_string())?;
    }
    if arguments.statistics {
        let files = &supervisor.files;
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let line = |name| status.lines().find(|line| line.starts_with(name)).unwrap_or_default();
        eprintln!(
            "draconis-run: {} calls, {} passed on; {} files and {} KiB in memfds at most, {} KiB \
             loaded, {} KiB written back; {}, {}",
            supervisor.calls,
            supervisor.passed_on,
            files.most_files,
            files.most_bytes >> 10,
            files.loaded >> 10,
            files.written >> 10,
            line("VmHWM"),
            line("VmRSS"),
        );
    }
    Ok(code)
}

fn open(arguments: &Arguments) -> Result<Volume, String> {
    let named = |error: String| format!("{}: {error}", arguments.image.display());
    let options = FileOptions { write: arguments.write, direct: false, uring: false };
    let disk =
        FileDisk::open(&arguments.image, options).map_err(|error| named(error.to_string()))?;
    let disk: Arc<dyn Disk> = Arc::new(disk);
    let opened = match arguments.write {
        false => Volume::open(disk, OpenOptions::default()),
        true => {
            let clock = Arc::new(|| {
                let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                Time { seconds: since.as_secs() as i64, nanoseconds: since.subsec_nanos() }
            });
            let (atime, discard) = (AccessTimes::Never, false);
            let writing = WriteOptions { clock, dirty_bytes: 64 << 20, atime, discard };
            Volume::open_for_writing(disk, OpenOptions::default(), writing)
        }
    };
    opened.map_err(|error| named(error.to_string()))
}

/// Starts the child, which waits, installs the filter, sends the listener and executes.
fn start(command: &[CString]) -> Result<(i32, std::os::unix::net::UnixStream), String> {
    let (ours, theirs) =
        std::os::unix::net::UnixStream::pair().map_err(|error| error.to_string())?;
    // SAFETY: no other thread runs yet.
    match unsafe { libc::fork() } {
        -1 => Err(std::io::Error::last_os_error().to_string()),
        0 => {
            drop(ours);
            let mut words: Vec<*const libc::c_char> =
                command.iter().map(|word| word.as_ptr()).collect();
            words.push(std::ptr::null());
            // SAFETY: the child of a process with one thread; plain calls.
            unsafe {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                let mut go = [0u8; 1];
                if libc::read(theirs.as_raw_fd(), go.as_mut_ptr().cast(), 1) != 1 {
                    libc::_exit(125);
                }
                match sys::install_filter() {
                    Ok(listener) => drop(sys::send_fd(theirs.as_raw_fd(), listener.as_raw_fd())),
                    Err(error) => {
                        libc::write(theirs.as_raw_fd(), error.to_ne_bytes().as_ptr().cast(), 4);
                        libc::_exit(125);
                    }
                }
                libc::execvp(words[0], words.as_ptr());
                let error = std::io::Error::last_os_error();
                eprintln!("draconis-run: {}: {error}", command[0].to_string_lossy());
                libc::_exit(127);
            }
        }
        child => Ok((child, ours)),
    }
}

fn listen(socket: &std::os::unix::net::UnixStream) -> Result<std::os::fd::OwnedFd, String> {
    use std::io::Write;
    (&*socket).write_all(b"g").map_err(|error| error.to_string())?;
    sys::receive_fd(socket.as_raw_fd()).map_err(|error| match error {
        libc::EBUSY => {
            "a process that started this one listens to system calls already (seccomp user \
                        notification), and the kernel allows one listener; run it outside of that \
                        sandbox, or mount the image: draconis mount"
                .to_owned()
        }
        error => format!(
            "the kernel refuses a listener for system calls: {}",
            std::io::Error::from_raw_os_error(error)
        ),
    })
}

/// Answers calls until the last process with the filter is gone; returns the child's exit code.
fn serve(supervisor: &mut Supervisor, child: i32) -> i32 {
    let fd = supervisor.listener.as_raw_fd();
    // The woken thread runs on the waker's processor: the caller waits anyway.
    // SAFETY: plain numbers; the limit is read first.
    unsafe {
        libc::ioctl(fd, sys::SET_FLAGS, 1u64);
        libc::signal(libc::SIGINT, libc::SIG_IGN);
        let mut limit: libc::rlimit = sys::zeroed();
        libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit);
        limit.rlim_cur = limit.rlim_max;
        libc::setrlimit(libc::RLIMIT_NOFILE, &limit);
    }
    let volume = Arc::clone(&supervisor.tree.volume);
    loop {
        // A poll of its own only while files wait to be written back.
        if supervisor.files.is_waiting() && sys::poll(fd, 20) == 0 {
            for _ in 0..64 {
                if !supervisor.files.tidy(&volume, true) {
                    break;
                }
            }
            continue;
        }
        if supervisor.serve_one() {
            supervisor.files.tidy(&volume, false);
        } else if sys::poll(fd, 0) & libc::POLLHUP != 0 {
            break;
        }
    }
    let mut status = 0;
    // SAFETY: our own child.
    unsafe { libc::waitpid(child, &mut status, 0) };
    if libc::WIFEXITED(status) { libc::WEXITSTATUS(status) } else { 128 + libc::WTERMSIG(status) }
}
