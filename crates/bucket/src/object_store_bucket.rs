//! Remote buckets, and directories, through `object_store`.
//!
//! Law 1: this module never retries. `RetryingStore` decides about retries and counts them.
//! Law 2: reads return no more than was requested, whatever the server sends.
//! Law 3: a thread that drives another runtime must not block on ours, so its requests are made by
//! a thread of their own. Asynchronous programs may therefore open, use and close a bucket.

use std::path::Path as FilePath;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::TryStreamExt;
use futures_util::stream::BoxStream;
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{
    Error, GetOptions, GetRange, ObjectMeta, ObjectStore, ObjectStoreExt, PutMode, PutOptions,
};
use tokio::runtime::{Builder, Handle};

use crate::api::{BucketApi, ListEntry, RequestError, RequestResult};
use crate::clouds;
use crate::directory::BucketDirectory;

/// Longest object that is read as a whole.
const MAX_WHOLE_READ_BYTES: u64 = 64 << 20;

/// A bucket, or a directory, at an address.
pub struct ObjectStoreBucket {
    store: Arc<dyn ObjectStore>,
    /// Folder of all keys.
    prefix: Path,
    network: NetworkRuntime,
    /// Set if it is a directory.
    directory: Option<BucketDirectory>,
}

/// A thread that drives network I/O. It ends when this is dropped.
struct NetworkRuntime {
    runtime: Handle,
    _alive: tokio::sync::oneshot::Sender<()>,
}

impl NetworkRuntime {
    fn start() -> Result<Self, String> {
        let runtime = Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| format!("no runtime for the network: {error}"))?;
        let handle = runtime.handle().clone();
        let (alive, ended) = tokio::sync::oneshot::channel();
        std::thread::Builder::new()
            .name("network".to_owned())
            .spawn(move || {
                // The error is expected: the sender was dropped.
                let _ = runtime.block_on(ended);
            })
            .map_err(|error| format!("no thread for the network: {error}"))?;
        Ok(Self { runtime: handle, _alive: alive })
    }

    /// Waits for a request.
    fn block_on<T: Send>(&self, request: impl Future<Output = T> + Send) -> T {
        run_outside_runtimes(|| self.runtime.block_on(request))
    }
}

/// Runs a call on this thread, or on its own if this one drives a runtime.
fn run_outside_runtimes<T: Send>(call: impl FnOnce() -> T + Send) -> T {
    if Handle::try_current().is_err() {
        return call();
    }
    std::thread::scope(|scope| {
        let joined = scope.spawn(call).join();
        joined.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Returns true if a text is an address of a bucket, with a known scheme or not.
pub fn is_address(text: &str) -> bool {
    text.split_once("://").is_some_and(|(scheme, _)| {
        !scheme.is_empty() && scheme.bytes().all(|byte| byte.is_ascii_alphanumeric())
    })
}

impl ObjectStoreBucket {
    /// Opens the bucket at `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX`, `az://CONTAINER/PREFIX` or
    /// `file:///DIRECTORY`, with the credentials of the provider's own tools. A missing directory
    /// is created if `makes` is set. Each request has this `timeout`.
    ///
    /// # Errors
    /// The fault of the address or the environment.
    pub fn open(address: &str, makes: bool, timeout: Duration) -> Result<Self, String> {
        let (scheme, rest) = address.split_once("://").ok_or("not an address of a bucket")?;
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let prefix = prefix.trim_matches('/');
        let network = NetworkRuntime::start()?;
        let store = match scheme {
            "file" => return Self::open_directory(address, rest, makes, network),
            "s3" | "gs" | "az" if bucket.is_empty() => {
                return Err(format!("{address}: no bucket is named; {scheme}://BUCKET/PREFIX"));
            }
            "s3" | "gs" | "az" => {
                let runtime = &network.runtime;
                run_outside_runtimes(|| {
                    clouds::open_cloud_store(scheme, bucket, address, timeout, runtime)
                })?
            }
            _ => {
                return Err(format!(
                    "{address}: {scheme}:// is not known; s3://, gs://, az:// and file:/// are"
                ));
            }
        };
        Ok(Self { store, prefix: prefix_path(address, prefix)?, network, directory: None })
    }

    fn open_directory(
        address: &str,
        path: &str,
        makes: bool,
        network: NetworkRuntime,
    ) -> Result<Self, String> {
        if !path.starts_with('/') {
            return Err(format!("{address}: file:// and an absolute path: file:///DIRECTORY"));
        }
        let path = FilePath::new(path);
        if makes {
            std::fs::create_dir_all(path).map_err(|error| format!("{address}: {error}"))?;
        }
        let store = match LocalFileSystem::new_with_prefix(path) {
            Ok(store) => store,
            Err(_) if !path.is_dir() => {
                return Err(format!(
                    "{address}: no such directory; draconis store create {address} makes a store"
                ));
            }
            Err(error) => return Err(format!("{address}: {error}")),
        };
        // Otherwise acknowledged data may be lost in a power cut.
        let store = Arc::new(store.with_fsync(true));
        let directory = Some(BucketDirectory::new(path.to_owned()));
        Ok(Self { store, prefix: Path::ROOT, network, directory })
    }

    fn path(&self, key: &str) -> Path {
        self.prefix.parts().chain(Path::from(key).parts()).collect()
    }

    fn request<T>(&self, request: impl FnOnce() -> RequestResult<T>) -> RequestResult<T> {
        match &self.directory {
            Some(directory) => directory.request(request),
            None => request(),
        }
    }

    fn write(&self, key: &str, bytes: Bytes, mode: PutMode) -> RequestResult<()> {
        let (path, options) = (self.path(key), PutOptions { mode, ..PutOptions::default() });
        let put = self.store.put_opts(&path, bytes.into(), options);
        self.request(|| match self.network.block_on(put) {
            Ok(_) => Ok(()),
            // A missing object cannot be the cause of a failed write: the bucket is missing.
            Err(error @ Error::NotFound { .. }) => Err(RequestError::Denied(error_message(&error))),
            Err(error) => Err(to_request_error(&error)),
        })
    }
}

impl BucketApi for ObjectStoreBucket {
    fn put(&self, key: &str, bytes: Bytes) -> RequestResult<()> {
        self.write(key, bytes, PutMode::Overwrite)
    }

    fn create(&self, key: &str, bytes: Bytes) -> RequestResult<()> {
        self.write(key, bytes, PutMode::Create)
    }

    fn get(&self, key: &str, range: Option<(u64, u64)>) -> RequestResult<Bytes> {
        let path = self.path(key);
        let range = range.map(|(from, len)| GetRange::Bounded(from..from + len));
        let most = match &range {
            Some(GetRange::Bounded(range)) => range.end - range.start,
            _ => MAX_WHOLE_READ_BYTES,
        };
        let options = GetOptions { range, ..GetOptions::default() };
        let get = || {
            self.network
                .block_on(async {
                    let got = self.store.get_opts(&path, options).await?;
                    let mut out = Vec::new();
                    let mut stream = got.into_stream();
                    while let Some(bytes) = stream.try_next().await? {
                        out.extend_from_slice(&bytes);
                        if out.len() as u64 > most {
                            break;
                        }
                    }
                    Ok(out)
                })
                .map_err(|error| to_request_error(&error))
                .and_then(|out| match out.len() as u64 > most {
                    true => Err(RequestError::Permanent(
                        "more bytes came than were asked for".to_owned(),
                    )),
                    false => Ok(out.into()),
                })
        };
        self.request(get)
    }

    fn head(&self, key: &str) -> RequestResult<u64> {
        let path = self.path(key);
        let head = || self.network.block_on(self.store.head(&path));
        self.request(|| head().map(|meta| meta.size).map_err(|error| to_request_error(&error)))
    }

    fn delete(&self, key: &str) -> RequestResult<()> {
        let path = self.path(key);
        self.request(|| match self.network.block_on(self.store.delete(&path)) {
            Ok(()) => Ok(()),
            Err(error) => match to_request_error(&error) {
                RequestError::NotFound => Ok(()),
                trouble => Err(trouble),
            },
        })
    }

    fn list(&self, folder: &str) -> RequestResult<Vec<ListEntry>> {
        let folder = self.path(folder);
        let folder = Some(&folder).filter(|folder| !folder.as_ref().is_empty());
        self.collect_list(self.store.list(folder))
    }

    fn list_after(&self, folder: &str, after: &str) -> RequestResult<Vec<ListEntry>> {
        self.collect_list(self.store.list_with_offset(Some(&self.path(folder)), &self.path(after)))
    }
}

impl ObjectStoreBucket {
    fn collect_list(
        &self,
        listed: BoxStream<'static, object_store::Result<ObjectMeta>>,
    ) -> RequestResult<Vec<ListEntry>> {
        let list = || self.network.block_on(listed.try_collect::<Vec<_>>());
        let all = self.request(|| {
            list().map_err(|error| match error {
                // A directory changed while it was listed; buckets report what they lack.
                Error::NotFound { .. } if self.prefix.is_root() => {
                    RequestError::Transient(error_message(&error))
                }
                Error::NotFound { .. } => RequestError::Denied(error_message(&error)),
                error => to_request_error(&error),
            })
        })?;
        let ours = all.into_iter().filter_map(|meta| {
            let key: Path = meta.location.prefix_match(&self.prefix)?.collect();
            Some(ListEntry { key: key.into(), len_bytes: meta.size })
        });
        Ok(ours.collect())
    }
}

/// Returns the folder of a prefix, with its characters unescaped. Repeated slashes count as one.
fn prefix_path(address: &str, prefix: &str) -> Result<Path, String> {
    let names: Vec<&str> = prefix.split('/').filter(|name| !name.is_empty()).collect();
    let is_odd = |name: &&&str| {
        matches!(**name, "." | "..") || name.contains(|c: char| c.is_ascii_control())
    };
    match names.iter().find(is_odd) {
        Some(name) => Err(format!(
            "{}: '{}' cannot be in a prefix: clients and proxies change it on the way",
            address.escape_debug(),
            name.escape_debug()
        )),
        None => Path::parse(names.join("/")).map_err(|error| format!("{address}: {error}")),
    }
}

fn to_request_error(error: &Error) -> RequestError {
    match error {
        // The bucket is missing, not the object.
        Error::NotFound { .. } if error_with_causes(error).contains("NoSuchBucket") => {
            RequestError::Denied(error_message(error))
        }
        Error::NotFound { .. } => RequestError::NotFound,
        Error::AlreadyExists { .. } | Error::Precondition { .. } => RequestError::AlreadyExists,
        Error::Generic { .. } if is_malformed_request(&error_with_causes(error)) => {
            RequestError::Denied(error_message(error))
        }
        Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => {
            RequestError::Denied(error_message(error))
        }
        Error::Generic { .. } | Error::JoinError { .. } => {
            RequestError::Transient(error_message(error))
        }
        _ => RequestError::Permanent(error_message(error)),
    }
}

/// Returns true if the error text reports status 400, except `RequestTimeout`, which S3 sends with
/// the same status.
fn is_malformed_request(told: &str) -> bool {
    told.contains("400 Bad Request") && !told.contains("RequestTimeout")
}

/// Returns an error as one sentence, with the server's message, if there is one.
fn error_message(error: &Error) -> String {
    let all = error_with_causes(error);
    let part = |name: &str| {
        let (_, rest) = all.split_once(&format!("<{name}>"))?;
        let (text, _) = rest.split_once(&format!("</{name}>"))?;
        let text: String = text.chars().filter(|c| !c.is_control()).take(300).collect();
        (!text.is_empty()).then_some(text)
    };
    let status = all.split_once("status code: ").map_or("", |(_, rest)| rest);
    let number: String = status.chars().take_while(char::is_ascii_digit).collect();
    let number = if number.is_empty() { number } else { format!("{number} ") };
    if let Some(code) = part("Code") {
        let message = part("Message").map(|text| format!(": {text}")).unwrap_or_default();
        let request = part("RequestId").map(|id| format!(" (request {id})")).unwrap_or_default();
        return format!("{number}{code}{message}{request}");
    }
    match all.to_ascii_lowercase().find("<html") {
        Some(_) => {
            format!("{number}a web page came instead of an answer: see that no proxy is in between")
        }
        None => all,
    }
}

/// Returns an error with its causes, which have the details.
fn error_with_causes(error: &Error) -> String {
    let error: &dyn std::error::Error = match error {
        // These only state that there is a cause.
        Error::Generic { source, .. } | Error::Unauthenticated { source, .. } => source.as_ref(),
        error => error,
    };
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefix_characters_are_kept() {
        for prefix in ["a/b", "tilde~", "ünï", "x#y", "50%", "%41", "*?[1]", "two words", "{|}^`\\"]
        {
            assert_eq!(prefix_path("s3://b", prefix).unwrap().as_ref(), prefix);
        }
        assert_eq!(prefix_path("s3://b", "a//b").unwrap().as_ref(), "a/b");
        assert!(prefix_path("s3://b", "").unwrap().is_root());
        for prefix in ["a/../b", ".", "new\nline"] {
            let said = prefix_path("s3://b", prefix).unwrap_err();
            assert!(said.contains("cannot be in a prefix"), "{said}");
        }
    }

    #[test]
    fn server_errors_become_one_sentence() {
        let said =
            |text: &str| to_request_error(&Error::Generic { store: "S3", source: text.into() });
        let name = said("status code: 400 Bad Request: <Code>InvalidBucketName</Code>");
        assert_eq!(name, RequestError::Denied("400 InvalidBucketName".to_owned()));
        let page = said("status code: 502 Bad Gateway: <HTML>");
        assert!(
            matches!(page, RequestError::Transient(text) if text.starts_with("502 a web page"))
        );
        let slow = said("status code: 400 Bad Request: <Code>RequestTimeout</Code>");
        assert!(matches!(slow, RequestError::Transient(_)));
        assert!(matches!(said("connection refused"), RequestError::Transient(_)));
    }
}
