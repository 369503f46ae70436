//! Failures: a code for SQLite and a message for people.

use std::path::Path;

use draconis_access::stores::with_context;
use draconis_objects::Error as StoreError;

use crate::codes::{self, Code};

/// A SQLite result code, and a message for its error log.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Failure {
    pub code: Code,
    /// Empty for codes that are part of normal use.
    pub message: String,
}

pub(crate) type Result<T> = std::result::Result<T, Failure>;

impl Failure {
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }

    /// Returns the failure to get a lock, which SQLite retries.
    pub fn busy() -> Self {
        Self::new(codes::BUSY, "")
    }

    /// Returns the failure for an error of a store; `code` if the error has no code of its own.
    pub fn of_store(store: &Path, error: StoreError, code: Code) -> Self {
        let code = match &error {
            StoreError::NoSpace { .. } => codes::FULL,
            StoreError::Corrupt { .. } => codes::IOERR_DATA,
            _ => code,
        };
        Self::new(code, with_context(store, error).to_string())
    }
}
