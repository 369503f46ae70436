//! Errors for programs: an errno and a message.

use draconis_device as device;
use draconis_ext::mkfs;
use draconis_objects as objects;
use draconis_service::volume::OpenError;
use rustix::io::Errno;

use crate::messages::to_message;

/// An errno and a message that names the object.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Error {
    /// Kind of failure.
    pub errno: Errno,
    /// The object, the failure, and the next step where there is one.
    pub message: String,
}

/// Result type of this crate's API.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Creates an error with the given errno.
    pub fn new(errno: Errno, message: impl Into<String>) -> Self {
        Self { errno, message: message.into() }
    }
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {}

impl From<anyhow::Error> for Error {
    fn from(error: anyhow::Error) -> Self {
        let errno = error.chain().find_map(errno_of_cause).unwrap_or(Errno::INVAL);
        Self { errno, message: to_message(&error) }
    }
}

/// Returns an EBUSY error: another program uses the object.
pub fn busy_error(message: String) -> anyhow::Error {
    Error::new(Errno::BUSY, message).into()
}

/// Returns an ENOENT error.
pub fn not_found_error(message: String) -> anyhow::Error {
    Error::new(Errno::NOENT, message).into()
}

/// Returns the errno for an error of an object store.
pub fn store_errno(error: &objects::Error) -> Errno {
    match error {
        objects::Error::Misuse(_) | objects::Error::NotAStore(_) | objects::Error::Disk(_) => {
            Errno::INVAL
        }
        objects::Error::NoObject(_) => Errno::NOENT,
        objects::Error::NoSpace { .. } => Errno::NOSPC,
        objects::Error::Corrupt { .. } => Errno::UCLEAN,
        objects::Error::Device(error) => disk_errno(error),
        objects::Error::Stopped(_) => Errno::ROFS,
    }
}

/// Returns the errno for an error of an offline change.
pub fn tune_errno(error: &draconis_ext::tune::OfflineError) -> Errno {
    use draconis_ext::tune::OfflineError;
    match error {
        OfflineError::Volume(error) => error.refusal().errno(),
        OfflineError::NotClean | OfflineError::Damaged { .. } => Errno::UCLEAN,
        OfflineError::TooSmall { .. } | OfflineError::ShortDisk { .. } => Errno::NOSPC,
        _ => Errno::INVAL,
    }
}

pub(crate) fn disk_errno(error: &device::Error) -> Errno {
    match error {
        device::Error::Io { errno, .. } => *errno,
        device::Error::Inherited { .. } => Errno::BADF,
        _ => Errno::IO,
    }
}

/// Returns the errno of one cause in an error chain, if its type is known.
fn errno_of_cause(cause: &(dyn std::error::Error + 'static)) -> Option<Errno> {
    if let Some(error) = cause.downcast_ref::<Error>() {
        return Some(error.errno);
    }
    if let Some(error) = cause.downcast_ref::<draconis_ext::Error>() {
        return Some(error.refusal().errno());
    }
    if let Some(error) = cause.downcast_ref::<draconis_ext::tune::OfflineError>() {
        return Some(tune_errno(error));
    }
    if let Some(error) = cause.downcast_ref::<OpenError>() {
        return Some(error.refusal().errno());
    }
    if let Some(error) = cause.downcast_ref::<objects::Error>() {
        return Some(store_errno(error));
    }
    if let Some(error) = cause.downcast_ref::<device::Error>() {
        return Some(disk_errno(error));
    }
    if let Some(error) = cause.downcast_ref::<mkfs::FormatError>() {
        return Some(match error {
            mkfs::FormatError::NoBlocks { .. } | mkfs::FormatError::NoInodes { .. } => Errno::NOSPC,
            mkfs::FormatError::Source { .. } => Errno::IO,
            mkfs::FormatError::Io(error) => disk_errno(error),
            _ => Errno::INVAL,
        });
    }
    if let Some(error) = cause.downcast_ref::<std::io::Error>() {
        return Errno::from_io_error(error);
    }
    cause.downcast_ref::<Errno>().copied()
}

#[cfg(test)]
mod tests {
    use anyhow::Context;

    use super::*;

    #[test]
    fn error_has_errno_of_its_cause() {
        let of = |error: anyhow::Error| Error::from(error.context("a.img:/x"));
        let full = of(draconis_ext::Error::NoSpace.into());
        assert_eq!(full.errno, Errno::NOSPC);
        assert!(full.message.starts_with("a.img:/x: no space left on device; "), "{full}");
        let refused = OpenError::Ext(draconis_ext::Error::NotFound);
        assert_eq!(of(refused.into()).errno, Errno::NOENT);
        assert_eq!(of(objects::Error::NotAStore("x".into()).into()).errno, Errno::INVAL);
        assert_eq!(of(std::io::Error::from_raw_os_error(13).into()).errno, Errno::ACCESS);
        assert_eq!(of(busy_error("it is in use".into())).errno, Errno::BUSY);
        let plain = Err::<(), _>(anyhow::anyhow!("wrong")).context("x").unwrap_err();
        assert_eq!(Error::from(plain), Error::new(Errno::INVAL, "x: wrong"));
    }
}
