//! What a bucket can do: six kinds of requests, and how they fail.
//!
//! Law 1: an object that is there is whole; none is seen by half.
//! Law 2: what was answered is seen by every request that begins later, lists too.
//! Law 3: of several who create one key, one is told that it did (the [probe](crate::probe) asks).

use bytes::Bytes;

/// Why a request was not done.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum RequestError {
    /// There is no such object.
    #[error("there is no such object")]
    NotFound,
    /// There is one already.
    #[error("the object is there already")]
    AlreadyExists,
    /// It may work when it is tried again; and it may have been done, its answer lost.
    #[error("{0}")]
    Transient(String),
    /// The server does not do it now: a clock that is wrong, a credential that has run out, a
    /// bucket that is not there. What it did before it may do again.
    #[error("{0}")]
    Denied(String),
    /// It will not work, however often it is tried.
    #[error("{0}")]
    Permanent(String),
}

/// What requests return.
pub type RequestResult<T> = Result<T, RequestError>;

/// An object as a list has it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ListEntry {
    /// Its key, behind the prefix of all.
    pub key: String,
    /// Its length.
    pub len_bytes: u64,
}

/// A bucket, or the part of one behind a prefix. Requests wait in the calling thread.
pub trait BucketApi: Send + Sync {
    /// Writes an object, in place of what is there.
    ///
    /// # Errors
    /// [`RequestError::Transient`], [`RequestError::Denied`] or [`RequestError::Permanent`].
    fn put(&self, key: &str, bytes: Bytes) -> RequestResult<()>;

    /// Writes an object, if none has the key.
    ///
    /// # Errors
    /// [`RequestError::AlreadyExists`], and as [`BucketApi::put`].
    fn create(&self, key: &str, bytes: Bytes) -> RequestResult<()>;

    /// Reads `len_bytes` from a byte on; all of the object if there is no range.
    ///
    /// # Errors
    /// [`RequestError::NotFound`], and as [`BucketApi::put`].
    fn get(&self, key: &str, range: Option<(u64, u64)>) -> RequestResult<Bytes>;

    /// Says how long an object is.
    ///
    /// # Errors
    /// As [`BucketApi::get`].
    fn head(&self, key: &str) -> RequestResult<u64>;

    /// Deletes an object; that there is none is no error.
    ///
    /// # Errors
    /// As [`BucketApi::put`].
    fn delete(&self, key: &str) -> RequestResult<()>;

    /// All objects whose keys begin with `folder` and a slash, in any order; with an empty name
    /// all there are.
    ///
    /// # Errors
    /// As [`BucketApi::put`].
    fn list(&self, folder: &str) -> RequestResult<Vec<ListEntry>>;
}
