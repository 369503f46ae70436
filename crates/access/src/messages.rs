//! Error messages: the object, named once; the failure; and the next step, where there is one.

use std::error::Error as Cause;
use std::fmt::Display;
use std::io::ErrorKind;

use draconis_ext::Error;
use draconis_service::error_text;
use draconis_service::volume::OpenError;
use rustix::io::Errno;

/// Callback for errors of a command that continues.
pub type ErrorSink<'a> = &'a mut dyn FnMut(&anyhow::Error);

/// Hint about damage; a walk prints it once.
pub const DAMAGE_HINT: &str =
    "the volume is damaged: draconis check shows all damage, draconis repair repairs it";

/// Adds the object to an error.
pub fn with_context(what: &dyn Display, error: Error) -> anyhow::Error {
    anyhow::Error::from(error).context(what.to_string())
}

/// Formats an error and its hint as one sentence.
pub fn to_message(error: &anyhow::Error) -> String {
    match split_message(error) {
        (text, Some(step)) => format!("{text}; {step}"),
        (text, None) => text,
    }
}

/// Formats a size in the largest unit that keeps it above one, as `ls -h` does.
pub fn format_bytes(n: u64) -> String {
    const UNITS: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut size = n as f64;
    let mut unit = 0;
    while size >= 1024.0 && unit + 1 < UNITS.len() {
        size /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{n} B") } else { format!("{size:.1} {}", UNITS[unit]) }
}

/// Escapes control characters in a name.
pub fn escape_control_chars(name: &[u8]) -> String {
    let mut text = String::new();
    for chunk in name.utf8_chunks() {
        for c in chunk.valid().chars() {
            if c.is_control() { text.extend(c.escape_default()) } else { text.push(c) }
        }
        for byte in chunk.invalid() {
            text += &format!("\\x{byte:02x}");
        }
    }
    text
}

/// Splits an error into its text and its hint.
pub fn split_message(error: &anyhow::Error) -> (String, Option<&'static str>) {
    let mut text = String::new();
    let mut last = String::new();
    for cause in error.chain() {
        let whole = error_text(cause);
        let part = whole.as_str();
        // Layers repeat the path or the text of the error that they wrap.
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
    (text, error.chain().find_map(hint_for_cause))
}

fn hint_for_cause(cause: &(dyn Cause + 'static)) -> Option<&'static str> {
    if let Some(error) = cause.downcast_ref::<OpenError>() {
        return match error {
            OpenError::Ext(error) => volume_hint(error),
            _ => None,
        };
    }
    if let Some(error) = cause.downcast_ref::<Error>() {
        return volume_hint(error);
    }
    if let Some(error) = cause.downcast_ref::<draconis_device::Error>() {
        return disk_hint(error);
    }
    let kind = match cause.downcast_ref::<std::io::Error>() {
        Some(error) => error.kind(),
        None => std::io::Error::from(*cause.downcast_ref::<Errno>()?).kind(),
    };
    io_error_hint(kind)
}

fn volume_hint(error: &Error) -> Option<&'static str> {
    Some(match error {
        Error::NoSpace => "remove something, or take a larger volume",
        Error::Corrupt { .. } => DAMAGE_HINT,
        Error::Unsupported { .. } => "Linux's own driver may know it: mount -o loop",
        Error::NotPermitted => "it is immutable or append-only: chattr -ia on the mounted volume",
        Error::NotEmpty => "rm -r removes a directory with all it holds",
        Error::OtherProject => "copy it there, and remove it here",
        Error::LinkLimit => "ext2 has room for no more names of it",
        Error::Io(error) => return disk_hint(error),
        Error::InUse { .. } => "unmount it there",
        _ => return None,
    })
}

fn disk_hint(error: &draconis_device::Error) -> Option<&'static str> {
    match error {
        draconis_device::Error::Io { errno, .. } => match std::io::Error::from(*errno).kind() {
            ErrorKind::StorageFull => Some("make room where the image is"),
            _ => Some("the disk below may be failing: dmesg tells more"),
        },
        draconis_device::Error::OutOfRange { .. } | draconis_device::Error::ShortRead { .. } => {
            Some("the image is shorter than what it holds")
        }
        _ => None,
    }
}

fn io_error_hint(kind: ErrorKind) -> Option<&'static str> {
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

    #[test]
    fn error_messages_include_hints() {
        assert_eq!(
            to_message(&with_context(&"a.img:/x", Error::NoSpace)),
            "a.img:/x: no space left on device; remove something, or take a larger volume"
        );
        assert_eq!(
            to_message(&with_context(&"x", Error::NotFound)),
            "x: no such file or directory"
        );
        let damage = Error::Corrupt { what: "inode", inode: None, block: None };
        assert_eq!(
            to_message(&with_context(&"x", damage)),
            format!("x: corrupt inode; {DAMAGE_HINT}")
        );
        let full = draconis_device::Error::Io {
            what: "write",
            extent: draconis_device::Extent::new(0, 512),
            errno: Errno::NOSPC,
        };
        let full = to_message(&with_context(&"a.img", full.into()));
        assert!(full.ends_with("No space left on device; make room where the image is"), "{full}");
    }

    #[test]
    fn error_message_has_path_once_and_no_errno() {
        let missing = || std::io::Error::from_raw_os_error(2);
        let error = Err::<(), _>(missing()).context("a/b").context("a/b").unwrap_err();
        assert_eq!(to_message(&error), "a/b: No such file or directory");
        let error = anyhow!("a/b: is wrong").context("a/b").context("top");
        assert_eq!(to_message(&error), "top: a/b: is wrong");
        let inside = anyhow!("{}", missing()).context("a");
        assert_eq!(to_message(&inside), "a: No such file or directory");
    }

    #[test]
    fn format_bytes_and_escaped_names() {
        assert_eq!((format_bytes(1023), format_bytes(1536)), ("1023 B".into(), "1.5 KiB".into()));
        assert_eq!(escape_control_chars(b"a\x1b[2J\xff\xc3\xa9"), "a\\u{1b}[2J\\xffé");
    }
}
