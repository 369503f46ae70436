//! Complaints on standard error.

use std::sync::atomic::{AtomicBool, Ordering};

use draconis_access::say::{DAMAGED, parts};

/// Writes a failure to standard error.
pub fn complain(error: &anyhow::Error) {
    static DAMAGE_TOLD: AtomicBool = AtomicBool::new(false);
    let (text, step) = parts(error);
    match step {
        Some(DAMAGED) if DAMAGE_TOLD.swap(true, Ordering::Relaxed) => eprintln!("draconis: {text}"),
        Some(step) => eprintln!("draconis: {text}; {step}"),
        None => eprintln!("draconis: {text}"),
    }
}

/// Writes what a user should know.
pub fn notes(notes: &[String]) {
    notes.iter().for_each(|note| eprintln!("draconis: {note}"));
}
