//! Bucket API: seven kinds of requests, and their errors.
//!
//! Law 1: an object is visible as a whole or not at all.
//! Law 2: every later request sees an acknowledged one, lists too.
//! Law 3: of concurrent creations of one key, one succeeds (the [probe](crate::probe) checks that).

use bytes::Bytes;

/// Error of a bucket request.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum RequestError {
    /// There is no such object.
    #[error("there is no such object")]
    NotFound,
    /// The object exists already.
    #[error("the object is there already")]
    AlreadyExists,
    /// A retry may work. The request may have been done, with its answer lost.
    #[error("{0}")]
    Transient(String),
    /// The server refuses it for now: a wrong clock, an expired credential, a missing bucket.
    /// Requests that worked before may work again.
    #[error("{0}")]
    Denied(String),
    /// Retries will not help.
    #[error("{0}")]
    Permanent(String),
}

/// Result of a request.
pub type RequestResult<T> = Result<T, RequestError>;

/// An entry of a list.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ListEntry {
    /// Key, without the common prefix.
    pub key: String,
    /// Length.
    pub len_bytes: u64,
}

/// A bucket, or the part of one under a prefix. Requests block the calling thread.
pub trait BucketApi: Send + Sync {
    /// Writes an object, and replaces an existing one.
    ///
    /// # Errors
    /// [`RequestError::Transient`], [`RequestError::Denied`] or [`RequestError::Permanent`].
    fn put(&self, key: &str, bytes: Bytes) -> RequestResult<()>;

    /// Writes an object, if none has the key.
    ///
    /// # Errors
    /// [`RequestError::AlreadyExists`], and as [`BucketApi::put`].
    fn create(&self, key: &str, bytes: Bytes) -> RequestResult<()>;

    /// Reads `len_bytes` from a byte on, or the whole object if there is no range.
    ///
    /// # Errors
    /// [`RequestError::NotFound`], and as [`BucketApi::put`].
    fn get(&self, key: &str, range: Option<(u64, u64)>) -> RequestResult<Bytes>;

    /// Returns the length of an object.
    ///
    /// # Errors
    /// As [`BucketApi::get`].
    fn head(&self, key: &str) -> RequestResult<u64>;

    /// Deletes an object; a missing one is no error.
    ///
    /// # Errors
    /// As [`BucketApi::put`].
    fn delete(&self, key: &str) -> RequestResult<()>;

    /// Lists all objects whose keys begin with `folder` and a slash, in any order; all objects if
    /// `folder` is empty.
    ///
    /// # Errors
    /// As [`BucketApi::put`].
    fn list(&self, folder: &str) -> RequestResult<Vec<ListEntry>>;

    /// Lists the objects of a folder whose keys follow `after`.
    ///
    /// # Errors
    /// As [`BucketApi::put`].
    fn list_after(&self, folder: &str, after: &str) -> RequestResult<Vec<ListEntry>> {
        let mut all = self.list(folder)?;
        all.retain(|listed| listed.key.as_str() > after);
        Ok(all)
    }
}
