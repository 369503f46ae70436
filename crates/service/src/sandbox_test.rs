//! Test of the worker's sandbox: confined processes attempt what they must not be able to do.
//!
//! ```text
//!   tester ── worker_command ──▶ child ── confine(Worker) ── "confined" ── attempt ── outcome
//!     └── the same, unconfined: shows that only the sandbox refuses it
//! ```
//!
//! Law 1: a child is started by the command that starts workers, and confined by the same call.
//! Law 2: each attempt has a process of its own, because the sandbox kills for most of them.
//! Law 3: an attempt counts as refused only if its process has reported its confinement first.

use std::convert::Infallible;
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::Pid;

use crate::options::MountOptions;
use crate::sandbox::{Confinement, SandboxProfile, close_other_fds, confine, seize_process};
use crate::worker_process::{worker_command, worker_memory_limit_bytes};

/// Timeout for one attempt.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(20);
/// Exit status of a child whose attempt failed with an error.
const EXIT_FAILED: i32 = 3;
/// Longest report of a child, in bytes.
const MAX_REPORT_BYTES: u64 = 4096;

/// Objects of an attempt that its tester prepares.
#[derive(Debug)]
pub struct AttemptTargets {
    /// A directory in which every user may create files.
    pub dir: PathBuf,
    /// A TCP port of this machine that accepts connections.
    pub port: u16,
}

/// One forbidden operation.
struct Attempt {
    name: &'static str,
    run: fn(&AttemptTargets, Pid) -> io::Result<()>,
}

/// All attempts, in the order in which they are made. The process is that of the tester.
const ATTEMPTS: &[Attempt] = &[
    Attempt { name: "open /etc/passwd", run: |_, _| File::open("/etc/passwd").map(drop) },
    Attempt {
        name: "create a file",
        run: |targets, _| File::create(targets.dir.join("created")).map(drop),
    },
    Attempt {
        name: "connect to a TCP port",
        run: |targets, _| TcpStream::connect(("127.0.0.1", targets.port)).map(drop),
    },
    Attempt { name: "make a Unix socket", run: |_, _| UnixDatagram::unbound().map(drop) },
    Attempt { name: "execute a program", run: |_, _| Err(own_version_command().exec()) },
    Attempt { name: "start a process", run: |_, _| own_version_command().status().map(drop) },
    Attempt {
        name: "signal the process that started it",
        // Signal 0: only the permission is checked.
        run: |_, tester| Ok(rustix::process::test_kill_process(tester)?),
    },
    Attempt { name: "trace the process that started it", run: |_, tester| seize_process(tester) },
];

fn own_version_command() -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.arg("--version").stdin(Stdio::null()).stdout(Stdio::null());
    command
}

/// How an attempt ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AttemptOutcome {
    /// It did what it attempted.
    Succeeded,
    /// The kernel killed its process for the system call.
    Killed,
    /// It got this error.
    Refused(String),
}

/// One attempt, made in both ways.
#[derive(Debug)]
pub struct AttemptReport {
    /// What was attempted.
    pub name: &'static str,
    /// Outcome in an unconfined process of the same user.
    pub unconfined: AttemptOutcome,
    /// Outcome in a process confined as a worker.
    pub confined: AttemptOutcome,
}

/// Outcome of all attempts.
#[derive(Debug)]
pub struct SandboxReport {
    /// Confinement that the kernel enforced.
    pub confinement: Confinement,
    /// The attempts, in the order in which they were made.
    pub attempts: Vec<AttemptReport>,
}

impl SandboxReport {
    /// Returns the attempts that succeeded in the sandbox.
    pub fn breaches(&self) -> Vec<&'static str> {
        let succeeded = |it: &&AttemptReport| it.confined == AttemptOutcome::Succeeded;
        self.attempts.iter().filter(succeeded).map(|it| it.name).collect()
    }
}

/// Makes every attempt, confined and unconfined. `dir` is an empty directory in which every user
/// may create files. `subcommand` of this program calls [`run_attempt`].
///
/// # Errors
/// A message, if a process cannot be started or confined, or ends in an unexpected way.
pub fn test_sandbox(subcommand: &str, dir: &Path) -> Result<SandboxReport, String> {
    // The kernel completes connections to it; nothing has to accept them.
    let listener = TcpListener::bind("127.0.0.1:0").and_then(|it| Ok((it.local_addr()?, it)));
    let (address, _listener) = listener.map_err(|error| format!("no TCP port: {error}"))?;
    let targets = AttemptTargets { dir: dir.to_path_buf(), port: address.port() };
    let mut report = SandboxReport { confinement: Confinement::default(), attempts: vec![] };
    for (index, Attempt { name, .. }) in ATTEMPTS.iter().enumerate() {
        let make = |is_confined| {
            start_attempt(subcommand, index, &targets, is_confined)
                .map_err(|why| format!("attempt to {name}: {why}"))
        };
        let (confinement, confined) = make(true)?;
        let (_, unconfined) = make(false)?;
        report.confinement = confinement;
        report.attempts.push(AttemptReport { name, unconfined, confined });
    }
    Ok(report)
}

/// Makes one attempt in a process of its own; returns its confinement and the outcome.
fn start_attempt(
    subcommand: &str,
    index: usize,
    targets: &AttemptTargets,
    is_confined: bool,
) -> Result<(Confinement, AttemptOutcome), String> {
    let text = |error: io::Error| error.to_string();
    let (control, theirs) = UnixStream::pair().map_err(text)?;
    control.set_read_timeout(Some(ATTEMPT_TIMEOUT)).map_err(text)?;
    let memory_limit_bytes = worker_memory_limit_bytes(&MountOptions::default());
    let mut command = worker_command(subcommand, memory_limit_bytes);
    command.arg("--attempt").arg(index.to_string()).args((!is_confined).then_some("--unconfined"));
    command.arg("--port").arg(targets.port.to_string()).arg("--dir").arg(&targets.dir);
    let mut child = command.stdin(Stdio::from(OwnedFd::from(theirs))).spawn().map_err(text)?;
    // The descriptor that the command has of the child's socket.
    drop(command);
    let mut said = vec![];
    let read = control.take(MAX_REPORT_BYTES).read_to_end(&mut said);
    // Kills a child that hangs; the others have closed the socket because they end.
    if read.is_err() {
        let _ = child.kill();
    }
    let status = child.wait().map_err(text)?;
    read.map_err(|error| format!("its process did not report: {error}"))?;
    parse_report(&String::from_utf8_lossy(&said), status)
}

/// Parses what a child reported, and how it ended: a line with its confinement, then the error of
/// its attempt, if it got one.
fn parse_report(said: &str, status: ExitStatus) -> Result<(Confinement, AttemptOutcome), String> {
    let (confinement, error) = said.split_once('\n').unwrap_or((said, ""));
    let confinement = serde_json::from_str(confinement)
        .map_err(|_| format!("its process made none ({status}): {said}"))?;
    let outcome = match (status.code(), status.signal()) {
        (Some(0), _) => AttemptOutcome::Succeeded,
        (Some(EXIT_FAILED), _) => AttemptOutcome::Refused(error.to_string()),
        (_, Some(libc::SIGSYS)) => AttemptOutcome::Killed,
        _ => return Err(format!("its process ended in an unexpected way: {status}")),
    };
    Ok((confinement, outcome))
}

/// Runs a child of [`test_sandbox`]: confines this process as a worker, unless `is_confined` is
/// false, and makes the attempt with this index. Reports on its standard input, a socket, and ends.
///
/// # Errors
/// A message, if anything but a tester started this process, or if it cannot be confined.
pub fn run_attempt(
    index: usize,
    targets: &AttemptTargets,
    memory_limit_bytes: Option<u64>,
    is_confined: bool,
) -> Result<Infallible, String> {
    let attempt = ATTEMPTS.get(index).ok_or("there is no such attempt")?;
    let tester = rustix::process::getppid().ok_or("the tester is gone")?;
    let control = io::stdin().as_fd().try_clone_to_owned().map_err(|error| error.to_string())?;
    let mut control = UnixStream::from(control);
    close_other_fds(&[control.as_fd()]);
    let confinement = match is_confined {
        true => confine(&SandboxProfile::Worker, memory_limit_bytes)
            .map_err(|error| error.to_string())?,
        false => Confinement::default(),
    };
    let mut line = serde_json::to_vec(&confinement).map_err(|error| error.to_string())?;
    line.push(b'\n');
    control.write_all(&line).map_err(|error| error.to_string())?;
    let Err(error) = (attempt.run)(targets, tester) else { std::process::exit(0) };
    let _ = control.write_all(crate::error_text(&error).as_bytes());
    std::process::exit(EXIT_FAILED)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFINED: &str =
        r#"{"landlock":"full","seccomp":true,"no_capabilities":true,"memory_limit_bytes":1}"#;

    fn outcome(said: &str, wait_status: i32) -> Result<AttemptOutcome, String> {
        parse_report(said, ExitStatus::from_raw(wait_status)).map(|(_, outcome)| outcome)
    }

    #[test]
    fn outcome_is_told_by_end_of_process() {
        let refused = format!("{CONFINED}\nPermission denied");
        assert_eq!(outcome(CONFINED, 0), Ok(AttemptOutcome::Succeeded));
        assert_eq!(outcome(CONFINED, libc::SIGSYS), Ok(AttemptOutcome::Killed));
        let denied = AttemptOutcome::Refused("Permission denied".into());
        assert_eq!(outcome(&refused, EXIT_FAILED << 8), Ok(denied));
        // Neither tells whether the sandbox refused.
        assert!(outcome(CONFINED, libc::SIGKILL).is_err());
        assert!(outcome(CONFINED, 1 << 8).is_err());
    }

    #[test]
    fn process_that_was_not_confined_proves_nothing() {
        assert!(outcome("", libc::SIGSYS).is_err());
        assert!(outcome("Permission denied", EXIT_FAILED << 8).is_err());
    }

    #[test]
    fn breaches_are_attempts_that_succeeded_in_sandbox() {
        let report = |name, confined| AttemptReport {
            name,
            unconfined: AttemptOutcome::Succeeded,
            confined,
        };
        let mut all = SandboxReport {
            confinement: Confinement::default(),
            attempts: vec![
                report("a", AttemptOutcome::Killed),
                report("b", AttemptOutcome::Refused("no".into())),
            ],
        };
        assert!(all.breaches().is_empty());
        all.attempts.push(report("c", AttemptOutcome::Succeeded));
        assert_eq!(all.breaches(), ["c"]);
    }
}
