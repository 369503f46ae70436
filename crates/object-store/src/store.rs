//! An open store as an [`ObjectStore`].

use std::fmt;
use std::ops::Range;
use std::path::{Path as HostPath, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use draconis_access::{NewStore, stores};
use draconis_bucket::BucketOptions;
use draconis_objects::Store;
use futures_util::stream::{self, BoxStream};
use futures_util::{StreamExt, TryStreamExt};
use object_store::list::{PaginatedListOptions, PaginatedListResult, PaginatedListStore};
use object_store::path::Path;
use object_store::{
    CopyMode, CopyOptions, Error, GetOptions, GetRange, GetResult, GetResultPayload, ListResult,
    MultipartUpload, ObjectMeta, ObjectStore, PutMultipartOptions, PutOptions, PutPayload,
    PutResult, RenameOptions, RenameTargetMode, Result,
};

use crate::blocking::run_blocking;
use crate::bucket::{self, OpenMode};
use crate::catalog::{Catalog, PIECE_BYTES};
use crate::error::{generic, not_found};
use crate::listing::{self, Page};
use crate::staging;
use crate::upload::{PartsUpload, Uploads};

/// Pieces of an object that are read ahead of the consumer of a stream.
const READ_AHEAD_PIECES: usize = 2;
/// Deletions in progress of one stream of paths.
const CONCURRENT_DELETIONS: usize = 16;

/// An object store in a file, on a block device or in a bucket. Clones share the opened store.
#[derive(Clone, Debug)]
pub struct DraconisStore {
    pub(crate) catalog: Arc<Catalog>,
    pub(crate) uploads: Arc<Uploads>,
    /// File, device or address.
    path: Option<PathBuf>,
}

impl DraconisStore {
    /// Creates an empty store, and the file if it is missing, and opens it.
    ///
    /// # Errors
    /// The target is in use or has other contents, or the disk is full.
    pub fn create(path: &HostPath, new: &NewStore) -> Result<Self> {
        draconis_access::Store::create(path, new).map_err(generic)?;
        Self::open(path)
    }

    /// Opens a store for reading and writing, exclusively.
    ///
    /// # Errors
    /// The file is no store, damaged, or in use.
    pub fn open(path: &HostPath) -> Result<Self> {
        Self::from_opened(stores::open_exclusive(path, false), path)
    }

    /// Opens a store for reading, shared with other readers.
    ///
    /// # Errors
    /// The file is no store, damaged, or open for writing.
    pub fn open_read_only(path: &HostPath) -> Result<Self> {
        Self::from_opened(stores::open_shared(path), path)
    }

    /// Creates an empty store of `len_bytes` in a bucket, and opens it. The address is
    /// `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX`, `az://CONTAINER/PREFIX` or `file:///DIRECTORY`,
    /// with the credentials of the provider's own tools.
    ///
    /// The name of the writer, its random number and the identity of the machine in `options` are
    /// set by this function, here and in the next two.
    ///
    /// # Errors
    /// The bucket has a store or lacks a guarantee, or cannot be reached.
    pub fn create_bucket(address: &str, len_bytes: u64, options: &BucketOptions) -> Result<Self> {
        Self::from_bucket(address, options, OpenMode::Create { len_bytes })
    }

    /// Opens the store in a bucket for reading and writing. It fences the previous writer, whose
    /// later changes fail; a mount only with [`BucketOptions::take_over`]. It uploads what a
    /// journal of an earlier writer has.
    ///
    /// # Errors
    /// There is no store, it is mounted or damaged, or the bucket cannot be reached.
    pub fn open_bucket(address: &str, options: &BucketOptions) -> Result<Self> {
        Self::from_bucket(address, options, OpenMode::Write)
    }

    /// Opens the store in a bucket for reading, in its current state, while others may write it.
    ///
    /// # Errors
    /// There is no store, it is damaged, or the bucket cannot be reached.
    pub fn open_bucket_read_only(address: &str, options: &BucketOptions) -> Result<Self> {
        Self::from_bucket(address, options, OpenMode::Read)
    }

    /// Uses a store that is open.
    ///
    /// # Errors
    /// The store is damaged, or its disk failed.
    pub fn from_store(store: Arc<Store>) -> Result<Self> {
        let catalog = Catalog::open(store).map_err(generic)?;
        Ok(Self { catalog, uploads: Arc::default(), path: None })
    }

    fn from_opened<E: Into<draconis_access::Error>>(
        store: std::result::Result<Arc<Store>, E>,
        path: &HostPath,
    ) -> Result<Self> {
        let store = Self::from_store(store.map_err(|error| generic(error.into()))?)?;
        Ok(Self { path: Some(path.to_owned()), ..store })
    }

    fn from_bucket(address: &str, options: &BucketOptions, mode: OpenMode) -> Result<Self> {
        let store = bucket::open_store(address, options, mode).map_err(generic)?;
        Ok(Self { path: Some(address.into()), ..Self::from_store(store)? })
    }

    /// Returns the store below.
    pub fn store(&self) -> &Arc<Store> {
        &self.catalog.store
    }

    /// Writes a checkpoint, so that opening the store has nothing to replay, and releases the file
    /// unless clones, uploads or streams still use it.
    ///
    /// # Errors
    /// The disk failed.
    pub async fn close(self) -> Result<()> {
        self.run(|catalog| {
            let store = &catalog.store;
            if store.is_read_only() {
                return Ok(());
            }
            store.sync().and_then(|()| store.checkpoint()).map_err(generic)
        })
        .await
    }

    /// Runs a call on the pool of the runtime, whose threads a forked child lacks.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        call: impl FnOnce(Arc<Catalog>) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let catalog = self.catalog.clone();
        catalog.process.check().map_err(generic)?;
        run_blocking(move || call(catalog)).await
    }

    fn list_range(&self, range: listing::Range) -> BoxStream<'static, Result<ObjectMeta>> {
        let store = self.clone();
        // Each page is of its own moment: a slow consumer keeps no bytes of the store from being
        // freed.
        stream::try_unfold(Some(range), move |range| {
            let store = store.clone();
            async move {
                let Some(range) = range else { return Ok::<_, Error>(None) };
                let asked = range.clone();
                let page = store.run(move |catalog| asked.list(&catalog.kv.snapshot())).await?;
                let next = page.next.map(|from| listing::Range { from, ..range });
                Ok(Some((stream::iter(page.objects.into_iter().map(Ok)), next)))
            }
        })
        .try_flatten()
        .boxed()
    }
}

impl fmt::Display for DraconisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.path {
            Some(path) => write!(f, "DraconisStore({})", path.display()),
            None => f.write_str("DraconisStore"),
        }
    }
}

#[async_trait]
impl ObjectStore for DraconisStore {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        opts: PutOptions,
    ) -> Result<PutResult> {
        let path = location.clone();
        self.run(move |catalog| {
            staging::put(&catalog, &path, &payload, &opts.mode, opts.attributes)
        })
        .await
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        opts: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        let path = location.clone();
        self.run(move |catalog| PartsUpload::create(&catalog, path, opts.attributes)).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let path = location.clone();
        self.run(move |catalog| get(&catalog, path, &options)).await
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        let (path, ranges) = (location.clone(), ranges.to_vec());
        self.run(move |catalog| {
            let (record, _pin) = catalog.find_pinned(&path)?;
            let read = |range: Range<u64>| {
                let range = GetRange::Bounded(range).as_range(record.len).map_err(generic)?;
                let len = range.end.saturating_sub(range.start);
                let len = usize::try_from(len).map_err(generic)?;
                catalog.read(&path, &record, range.start, len)
            };
            ranges.into_iter().map(read).collect()
        })
        .await
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        let store = self.clone();
        let delete = move |location: Result<Path>| {
            let store = store.clone();
            async move {
                let path = location?;
                store
                    .run(move |catalog| {
                        catalog.remove(&path)?;
                        Ok(path)
                    })
                    .await
            }
        };
        locations.map(delete).buffered(CONCURRENT_DELETIONS).boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.list_range(listing::Range::below(prefix))
    }

    fn list_with_offset(
        &self,
        prefix: Option<&Path>,
        offset: &Path,
    ) -> BoxStream<'static, Result<ObjectMeta>> {
        self.list_range(listing::Range::below(prefix).after(offset.as_ref()))
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        let range = listing::Range {
            delimiter: Some('/'),
            limit: usize::MAX,
            ..listing::Range::below(prefix)
        };
        let page = self.run(move |catalog| range.list(&catalog.kv.snapshot())).await?;
        Ok(to_list_result(page))
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        let (from, to) = (from.clone(), to.clone());
        let must_create = matches!(options.mode, CopyMode::Create);
        self.run(move |catalog| catalog.copy(&from, &to, must_create)).await
    }

    async fn rename_opts(&self, from: &Path, to: &Path, options: RenameOptions) -> Result<()> {
        let (from, to) = (from.clone(), to.clone());
        let must_create = matches!(options.target_mode, RenameTargetMode::Create);
        self.run(move |catalog| catalog.rename(&from, &to, must_create)).await
    }
}

#[async_trait]
impl PaginatedListStore for DraconisStore {
    async fn list_paginated(
        &self,
        prefix: Option<&str>,
        opts: PaginatedListOptions,
    ) -> Result<PaginatedListResult> {
        let delimiter = match opts.delimiter.as_deref().map(|text| text.chars().collect()) {
            None => None,
            Some::<Vec<char>>(chars) => match chars.as_slice() {
                [one] => Some(*one),
                _ => {
                    let source = "a delimiter of a list is one character".into();
                    return Err(Error::NotSupported { source });
                }
            },
        };
        let range = listing::Range {
            prefix: prefix.unwrap_or_default().to_owned(),
            from: String::new(),
            delimiter,
            limit: opts.max_keys.unwrap_or(PAGE_LIMIT).min(PAGE_LIMIT),
        };
        let range = match (opts.page_token, opts.offset) {
            (Some(from), _) => listing::Range { from, ..range },
            (None, Some(offset)) => range.after(&offset),
            (None, None) => range,
        };
        let mut page = self.run(move |catalog| range.list(&catalog.kv.snapshot())).await?;
        let page_token = page.next.take();
        Ok(PaginatedListResult { result: to_list_result(page), page_token })
    }
}

/// Default and limit of a page that a caller asks for, as with S3.
const PAGE_LIMIT: usize = listing::PAGE_OBJECTS;

fn to_list_result(page: Page) -> ListResult {
    let Page { objects, common_prefixes, next: _ } = page;
    ListResult { objects, common_prefixes, extensions: Default::default() }
}

/// Finds an object, reads the first piece, and returns a stream of it and the rest.
fn get(catalog: &Arc<Catalog>, path: Path, options: &GetOptions) -> Result<GetResult> {
    let (record, pin) = catalog.find_pinned(&path)?;
    let meta = record.to_meta(path.clone());
    if options.version.is_some() {
        // There are no versions, so nobody has got one.
        return Err(not_found(&path));
    }
    options.check_preconditions(&meta)?;
    let range = match &options.range {
        Some(range) => range.as_range(record.len).map_err(generic)?,
        None => 0..record.len,
    };
    let attributes = record.attributes.clone();
    let pieces = match options.head {
        true => stream::empty().boxed(),
        false => {
            let mut starts = range.clone().step_by(PIECE_BYTES);
            let end = range.end;
            let piece_len = move |at: u64| {
                usize::try_from(end.saturating_sub(at)).unwrap_or(PIECE_BYTES).min(PIECE_BYTES)
            };
            let first = match starts.next() {
                Some(at) => Some(catalog.read(&path, &record, at, piece_len(at))?),
                None => None,
            };
            let held = Arc::new((catalog.clone(), path, record, pin));
            let read = move |at: u64| {
                let held = held.clone();
                run_blocking(move || {
                    let (catalog, path, record, _pin) = &*held;
                    catalog.read(path, record, at, piece_len(at))
                })
            };
            let rest = stream::iter(starts).map(read).buffered(READ_AHEAD_PIECES);
            stream::iter(first.map(Ok)).chain(rest).boxed()
        }
    };
    let payload = GetResultPayload::Stream(pieces);
    Ok(GetResult { payload, meta, range, attributes, extensions: Default::default() })
}
