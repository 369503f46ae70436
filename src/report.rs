//! Lines on standard output and errors on standard error.
//!
//! Law 1: a closed output ends a command silently; a closed standard error has no effect.

use std::fmt::Display;
use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};

use draconis_access::messages::{DAMAGE_HINT, split_message};

/// Exit status of a program that SIGPIPE killed.
const EXIT_OUTPUT_CLOSED: u8 = 128 + 13;

/// Writes a line to standard output.
///
/// # Errors
/// The line cannot be written, for example because the reader closed the pipe.
pub fn print_line(line: impl Display) -> io::Result<()> {
    writeln!(io::stdout(), "{line}")
}

/// Writes a line to standard error; ignores failures.
pub fn warn_line(line: impl Display) {
    let _ = writeln!(io::stderr(), "{line}");
}

/// True while a progress bar is on the terminal.
static IS_BAR_SHOWN: AtomicBool = AtomicBool::new(false);

/// Records whether a progress bar is on the terminal.
pub fn set_bar_shown(is_shown: bool) {
    IS_BAR_SHOWN.store(is_shown, Ordering::Relaxed);
}

/// Writes the last line of a process, below a progress bar that it leaves behind.
pub fn last_line(line: impl Display) {
    if IS_BAR_SHOWN.load(Ordering::Relaxed) {
        warn_line("");
    }
    warn_line(line);
}

/// Writes an error to standard error.
pub fn print_error(error: &anyhow::Error) {
    static DAMAGE_HINT_SHOWN: AtomicBool = AtomicBool::new(false);
    let (text, step) = split_message(error);
    match step {
        Some(DAMAGE_HINT) if DAMAGE_HINT_SHOWN.swap(true, Ordering::Relaxed) => {
            warn_line(format_args!("draconis: {text}"));
        }
        Some(step) => warn_line(format_args!("draconis: {text}; {step}")),
        None => warn_line(format_args!("draconis: {text}")),
    }
}

/// Ends a failed command: prints the error and returns `status`. Prints nothing if the reader
/// closed the output.
pub fn report_failure(error: &anyhow::Error, status: u8) -> ExitCode {
    if is_broken_pipe(error) {
        return ExitCode::from(EXIT_OUTPUT_CLOSED);
    }
    print_error(error);
    ExitCode::from(status)
}

/// Prints notes for the user.
pub fn print_notes(notes: &[String]) {
    notes.iter().for_each(|note| warn_line(format_args!("draconis: {note}")));
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let mut errors = error.chain().filter_map(|error| error.downcast_ref::<io::Error>());
    errors.any(|error| error.kind() == io::ErrorKind::BrokenPipe)
}
