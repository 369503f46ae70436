//! SIGINT, SIGTERM and SIGHUP of long commands: they end with a line that says what remains and how
//! to go on, and with 128 and the number of the signal.
//!
//! ```text
//!   set_command ─ sandbox ─ progress begins: watch ─ signal ─▶ socket ─▶ thread: parts removed, line, exit
//! ```
//! Law 1: the thread starts after the sandbox was applied. Until then nothing was read or written,
//! and signals have their usual effect.
//! Law 2: the second signal ends the process at once, whatever it waits for.
//! Law 3: a signal that the caller had this command ignore, as nohup does, stays ignored.
//!
//! The state of images and stores is that of a kill: each is consistent at any moment.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Once, PoisonError};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::{new_file, report};

/// What remains of each command that was ended, and how to go on. Other commands have no handler.
const REMAINS: &[(&str, &str)] = &[
    ("check", "nothing was changed; the check begins anew with the same command"),
    ("cp", ADDED),
    ("format", "the image holds no volume yet; the same command with --force makes it"),
    ("get", COPIED_ANEW),
    ("grow", CHANGED_WHOLE),
    ("kv load", "the first lines are in the store; the same command loads them and the rest"),
    ("put", ADDED),
    ("repair", CHANGED_WHOLE),
    ("rescue", "the copied files are whole; the same command goes on with the others"),
    ("shrink", CHANGED_WHOLE),
    ("store append", "the object may have the first part of the file; store ls shows its length"),
    ("store check", "nothing was changed; the check begins anew with the same command"),
    ("store create", "there is no store yet; the same command with --force creates it"),
    ("store get", "the file was not written; the same command copies the object anew"),
    ("store put", "the object may have the first part of the file; the same command puts it anew"),
    ("store salvage", "the new store is not complete; without it, the same command begins anew"),
    ("tar", "the archive is not complete; the same command writes it anew"),
    ("tune", CHANGED_WHOLE),
    ("undelete", "the copied files are whole; the same command copies the others"),
    ("untar", ADDED),
];
const ADDED: &str = "the volume is consistent and has what was copied so far; the same command \
    copies everything anew";
const COPIED_ANEW: &str = "the copied files are whole; the same command copies everything anew";
const CHANGED_WHOLE: &str = "the volume is as it was, or the same command completes the change";

/// The command of this process.
struct LongCommand {
    remains: &'static str,
    /// Signals with a handler.
    signals: Vec<i32>,
    receiver: UnixStream,
    sender: UnixStream,
}

static COMMAND: Mutex<Option<LongCommand>> = Mutex::new(None);

/// Prepares for the signals of a command, named as on the command line. Called before the sandbox,
/// which lets no process make sockets.
pub fn set_command(name: &str) {
    let Some((_, remains)) = REMAINS.iter().find(|(of, _)| *of == name) else { return };
    let Ok((receiver, sender)) = UnixStream::pair() else { return };
    let signals = [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|it| !is_ignored(*it)).collect();
    *COMMAND.lock().unwrap_or_else(PoisonError::into_inner) =
        Some(LongCommand { remains, signals, receiver, sender });
}

/// Returns true if this process was started with a signal ignored.
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask & (1 << (signal - 1)) != 0)
}

/// Handles signals from now on. Called when the work begins: by all progress bars.
pub fn watch() {
    static STARTED: Once = Once::new();
    STARTED.call_once(|| {
        let command = COMMAND.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(command) = command
            && let Err(error) = command.start()
        {
            log::debug!("signals have their usual effect: {error}");
        }
    });
}

impl LongCommand {
    fn start(self) -> std::io::Result<()> {
        let Self { remains, signals, mut receiver, sender } = self;
        if signals.is_empty() {
            return Ok(());
        }
        draconis_service::sandbox::limit_malloc_arenas();
        let received = Arc::new(AtomicUsize::new(0));
        let signal = received.clone();
        std::thread::Builder::new().name("signals".to_owned()).spawn(move || {
            while let Err(error) = receiver.read(&mut [0]) {
                if error.kind() != std::io::ErrorKind::Interrupted {
                    return;
                }
            }
            new_file::remove_unpublished();
            report::last_line(format_args!("draconis: interrupted: {remains}"));
            let signal = i32::try_from(signal.load(Ordering::SeqCst)).unwrap_or(SIGTERM);
            // Not `process::exit`, which waits if the main thread ends meanwhile.
            signal_hook::low_level::exit(128 + signal);
        })?;
        let is_signalled = Arc::new(AtomicBool::new(false));
        for signal in signals {
            // The second signal.
            let second = is_signalled.clone();
            signal_hook::flag::register_conditional_shutdown(signal, 128 + signal, second)?;
            signal_hook::flag::register(signal, is_signalled.clone())?;
            let number = usize::try_from(signal).unwrap_or(0);
            signal_hook::flag::register_usize(signal, received.clone(), number)?;
            signal_hook::low_level::pipe::register(signal, sender.try_clone()?)?;
        }
        Ok(())
    }
}
