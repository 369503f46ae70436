//! Errors, as those of the crate `object_store`.

use draconis_objects::Error as StoreError;
use object_store::Error;
use object_store::path::Path;

/// Name of this implementation in errors.
pub(crate) const STORE: &str = "Draconis";

/// An error of the store, with the object that it is about.
#[derive(Debug, thiserror::Error)]
#[error("{path}: {source}")]
struct ObjectError {
    path: String,
    source: StoreError,
}

/// Adds the path of the object to an error of the store.
pub(crate) fn with_path(path: &Path, error: StoreError) -> Error {
    match error {
        // Another program deleted the object without its record.
        StoreError::NoObject(_) => Error::NotFound { path: path.to_string(), source: error.into() },
        source => generic(ObjectError { path: path.to_string(), source }),
    }
}

pub(crate) fn generic(source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
    Error::Generic { store: STORE, source: source.into() }
}

pub(crate) fn not_found(path: &Path) -> Error {
    Error::NotFound { path: path.to_string(), source: "the store has no such object".into() }
}

pub(crate) fn already_exists(path: &Path) -> Error {
    Error::AlreadyExists { path: path.to_string(), source: "the object exists".into() }
}

pub(crate) fn precondition(path: &Path, reason: String) -> Error {
    Error::Precondition { path: path.to_string(), source: reason.into() }
}

/// An object whose record or contents are not as this crate writes them.
pub(crate) fn damaged(path: &str, what: &str) -> Error {
    generic(format!("{path}: {what}"))
}
