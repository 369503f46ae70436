//! What is said of a failure: what it is about, once; what went wrong, in words; and the next
//! step, where there is one.

use std::error::Error as Cause;
use std::io::ErrorKind;
use std::sync::atomic::{AtomicBool, Ordering};

use draconis_ext::Error;
use draconis_service::sentence;
use draconis_service::volume::OpenError;
use rustix::io::Errno;

/// What to do about damage. A walk may meet much of it, and says this once.
const DAMAGED: &str =
    "the volume is damaged: draconis check shows all damage, and e2fsck -f repairs it";

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

/// A failure and the next step, as one sentence.
#[cfg(test)]
pub fn said(error: &anyhow::Error) -> String {
    match parts(error) {
        (text, Some(step)) => format!("{text}; {step}"),
        (text, None) => text,
    }
}

fn parts(error: &anyhow::Error) -> (String, Option<&'static str>) {
    let mut text = String::new();
    let mut last = String::new();
    for cause in error.chain() {
        let whole = sentence(cause);
        let part = whole.as_str();
        // Layers name the same path, or repeat what they wrap.
        let new = match part.strip_prefix(&last) {
            Some("") if !last.is_empty() => continue,
            Some(rest) => rest.strip_prefix(": ").unwrap_or(part),
            None if text.ends_with(part) => continue,
            None => part,
        };
        if !text.is_empty() {
            text += ": ";
        }
        text += new;
        last = part.to_owned();
    }
    (text, error.chain().find_map(step))
}

fn step(cause: &(dyn Cause + 'static)) -> Option<&'static str> {
    if let Some(error) = cause.downcast_ref::<OpenError>() {
        return match error {
            OpenError::Ext(error) => of_volume(error),
            _ => None,
        };
    }
    if let Some(error) = cause.downcast_ref::<Error>() {
        return of_volume(error);
    }
    if let Some(error) = cause.downcast_ref::<draconis_device::Error>() {
        return of_disk(error);
    }
    let kind = match cause.downcast_ref::<std::io::Error>() {
        Some(error) => error.kind(),
        None => std::io::Error::from(*cause.downcast_ref::<Errno>()?).kind(),
    };
    of_system(kind)
}

fn of_volume(error: &Error) -> Option<&'static str> {
    Some(match error {
        Error::NoSpace => "remove something, or take a larger volume",
        Error::Corrupt { .. } => DAMAGED,
        Error::Unsupported { .. } => "Linux's own driver may know it: mount -o loop",
        Error::NotPermitted => "it is immutable or append-only: chattr -ia on the mounted volume",
        Error::NotEmpty => "rm -r removes a directory with all it holds",
        Error::OtherProject => "copy it there, and remove it here",
        Error::LinkLimit => "ext2 has room for no more names of it",
        Error::Io(error) => return of_disk(error),
        Error::InUse { .. } => "unmount it there",
        _ => return None,
    })
}

fn of_disk(error: &draconis_device::Error) -> Option<&'static str> {
    match error {
        draconis_device::Error::Io { errno, .. } => match std::io::Error::from(*errno).kind() {
            ErrorKind::StorageFull => Some("make room where the image is"),
            _ => Some("the disk below may be failing: dmesg tells more"),
        },
        draconis_device::Error::OutOfRange { .. } | draconis_device::Error::Short { .. } => {
            Some("the image is shorter than what it holds")
        }
        _ => None,
    }
}

fn of_system(kind: ErrorKind) -> Option<&'static str> {
    Some(match kind {
        ErrorKind::PermissionDenied => "ls -l shows who may",
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => "make room there",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use anyhow::{Context, anyhow};

    use super::*;
    use crate::change::tell;

    #[test]
    fn errors_tell_the_next_step() {
        assert_eq!(
            said(&tell(&"a.img:/x", Error::NoSpace)),
            "a.img:/x: no space left on device; remove something, or take a larger volume"
        );
        assert_eq!(said(&tell(&"x", Error::NotFound)), "x: no such file or directory");
        let damage = Error::Corrupt { what: "inode", inode: None, block: None };
        assert_eq!(said(&tell(&"x", damage)), format!("x: corrupt inode; {DAMAGED}"));
        let full = draconis_device::Error::Io {
            what: "write",
            extent: draconis_device::Extent::new(0, 512),
            errno: Errno::NOSPC,
        };
        let full = said(&tell(&"a.img", full.into()));
        assert!(full.ends_with("No space left on device; make room where the image is"), "{full}");
    }

    #[test]
    fn a_path_is_said_once_and_no_number() {
        let missing = || std::io::Error::from_raw_os_error(2);
        let error = Err::<(), _>(missing()).context("a/b").context("a/b").unwrap_err();
        assert_eq!(said(&error), "a/b: No such file or directory");
        let error = anyhow!("a/b: is wrong").context("a/b").context("top");
        assert_eq!(said(&error), "top: a/b: is wrong");
        let inside = anyhow!("{}", missing()).context("a");
        assert_eq!(said(&inside), "a: No such file or directory");
    }
}
