//! The interface of `object_store` 0.13, for programs that use that version.
//!
//! Every call goes to the store's own interface, with types of the same names converted: laws and
//! errors are those of [`crate::DraconisStore`].

use std::fmt;
use std::ops::Range;

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::stream::BoxStream;
use futures_util::{StreamExt, TryFutureExt, TryStreamExt};
use object_store::{
    self as current, MultipartUpload as _, ObjectStore as _, RenameTargetMode as CurrentTarget,
};
use object_store_0_13::path::Path;
use object_store_0_13::{
    Attribute, Attributes, CopyMode, CopyOptions, Error, GetOptions, GetRange, GetResult,
    GetResultPayload, ListResult, MultipartUpload, ObjectMeta, ObjectStore, PutMode,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, RenameOptions, RenameTargetMode,
    Result, UploadPart,
};

/// A store behind the interface of `object_store` 0.13.
#[derive(Clone, Debug)]
pub struct DraconisStore(crate::DraconisStore);

impl From<crate::DraconisStore> for DraconisStore {
    fn from(store: crate::DraconisStore) -> Self {
        Self(store)
    }
}

impl fmt::Display for DraconisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Returns an error of the same kind.
fn error(error: current::Error) -> Error {
    use current::Error as Current;
    match error {
        Current::NotFound { path, source } => Error::NotFound { path, source },
        Current::AlreadyExists { path, source } => Error::AlreadyExists { path, source },
        Current::Precondition { path, source } => Error::Precondition { path, source },
        Current::NotModified { path, source } => Error::NotModified { path, source },
        Current::NotSupported { source } => Error::NotSupported { source },
        Current::NotImplemented { operation, implementer } => {
            Error::NotImplemented { operation, implementer }
        }
        Current::Generic { store, source } => Error::Generic { store, source },
        other => generic(other),
    }
}

fn generic(source: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::Generic { store: "DraconisStore", source: Box::new(source) }
}

fn to_current(path: &Path) -> Result<current::path::Path> {
    current::path::Path::parse(path.as_ref()).map_err(generic)
}

fn to_path(path: &current::path::Path) -> Result<Path> {
    Path::parse(path.as_ref()).map_err(generic)
}

fn payload(payload: PutPayload) -> current::PutPayload {
    payload.into_iter().collect()
}

fn put_result(result: current::PutResult) -> PutResult {
    PutResult { e_tag: result.e_tag, version: result.version }
}

fn object_meta(meta: &current::ObjectMeta) -> Result<ObjectMeta> {
    Ok(ObjectMeta {
        location: to_path(&meta.location)?,
        last_modified: meta.last_modified,
        size: meta.size,
        e_tag: meta.e_tag.clone(),
        version: meta.version.clone(),
    })
}

/// Converts between the attributes of two versions; those that only one knows are left out.
macro_rules! convert_attributes {
    ($attributes:expr, $from:ty, $to:ty) => {
        $attributes
            .iter()
            .filter_map(|(name, value)| {
                use $from as From;
                use $to as To;
                let name = match name {
                    From::ContentDisposition => To::ContentDisposition,
                    From::ContentEncoding => To::ContentEncoding,
                    From::ContentLanguage => To::ContentLanguage,
                    From::ContentType => To::ContentType,
                    From::CacheControl => To::CacheControl,
                    From::StorageClass => To::StorageClass,
                    From::Metadata(name) => To::Metadata(name.clone()),
                    _ => return None,
                };
                Some((name, value.as_ref().to_owned()))
            })
            .collect()
    };
}

fn attributes(attributes: &Attributes) -> current::Attributes {
    convert_attributes!(attributes, Attribute, current::Attribute)
}

fn get_options(options: GetOptions) -> current::GetOptions {
    current::GetOptions {
        if_match: options.if_match,
        if_none_match: options.if_none_match,
        if_modified_since: options.if_modified_since,
        if_unmodified_since: options.if_unmodified_since,
        range: options.range.map(|range| match range {
            GetRange::Bounded(range) => current::GetRange::Bounded(range),
            GetRange::Offset(from) => current::GetRange::Offset(from),
            GetRange::Suffix(len) => current::GetRange::Suffix(len),
        }),
        version: options.version,
        head: options.head,
        extensions: options.extensions,
    }
}

fn list(list: BoxStream<'static, current::Result<current::ObjectMeta>>) -> Metas {
    list.map(|meta| meta.map_err(error).and_then(|meta| object_meta(&meta))).boxed()
}

type Metas = BoxStream<'static, Result<ObjectMeta>>;

#[async_trait]
impl ObjectStore for DraconisStore {
    async fn put_opts(
        &self,
        location: &Path,
        contents: PutPayload,
        options: PutOptions,
    ) -> Result<PutResult> {
        let options = current::PutOptions {
            mode: match options.mode {
                PutMode::Overwrite => current::PutMode::Overwrite,
                PutMode::Create => current::PutMode::Create,
                PutMode::Update(version) => current::PutMode::Update(current::UpdateVersion {
                    e_tag: version.e_tag,
                    version: version.version,
                }),
            },
            attributes: attributes(&options.attributes),
            extensions: options.extensions,
            // The store ignores tags.
            tags: current::TagSet::default(),
        };
        let put = self.0.put_opts(&to_current(location)?, payload(contents), options).await;
        put.map(put_result).map_err(error)
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        let options = current::PutMultipartOptions {
            attributes: attributes(&options.attributes),
            extensions: options.extensions,
            tags: current::TagSet::default(),
        };
        let upload = self.0.put_multipart_opts(&to_current(location)?, options).await;
        Ok(Box::new(Upload(upload.map_err(error)?)))
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let got = self.0.get_opts(&to_current(location)?, get_options(options)).await;
        let got = got.map_err(error)?;
        Ok(GetResult {
            meta: object_meta(&got.meta)?,
            range: got.range.clone(),
            attributes: convert_attributes!(got.attributes, current::Attribute, Attribute),
            payload: GetResultPayload::Stream(got.into_stream().map_err(error).boxed()),
        })
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        self.0.get_ranges(&to_current(location)?, ranges).await.map_err(error)
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        let generic = |source: Error| current::Error::Generic {
            store: "DraconisStore",
            source: Box::new(source),
        };
        let locations = locations
            .map(move |path| path.and_then(|path| to_current(&path)).map_err(generic))
            .boxed();
        let deleted = self.0.delete_stream(locations);
        deleted.map(|path| path.map_err(error).and_then(|path| to_path(&path))).boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> Metas {
        match prefix.map(to_current).transpose() {
            Ok(prefix) => list(self.0.list(prefix.as_ref())),
            Err(error) => futures_util::stream::once(async { Err(error) }).boxed(),
        }
    }

    fn list_with_offset(&self, prefix: Option<&Path>, offset: &Path) -> Metas {
        let paths =
            prefix.map(to_current).transpose().and_then(|prefix| Ok((prefix, to_current(offset)?)));
        match paths {
            Ok((prefix, offset)) => list(self.0.list_with_offset(prefix.as_ref(), &offset)),
            Err(error) => futures_util::stream::once(async { Err(error) }).boxed(),
        }
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        let prefix = prefix.map(to_current).transpose()?;
        let found = self.0.list_with_delimiter(prefix.as_ref()).await.map_err(error)?;
        Ok(ListResult {
            common_prefixes: found.common_prefixes.iter().map(to_path).collect::<Result<_>>()?,
            objects: found.objects.iter().map(object_meta).collect::<Result<_>>()?,
        })
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        let mode = match options.mode {
            CopyMode::Overwrite => current::CopyMode::Overwrite,
            CopyMode::Create => current::CopyMode::Create,
        };
        let options = current::CopyOptions { mode, extensions: options.extensions };
        self.0.copy_opts(&to_current(from)?, &to_current(to)?, options).await.map_err(error)
    }

    async fn rename_opts(&self, from: &Path, to: &Path, options: RenameOptions) -> Result<()> {
        let target_mode = match options.target_mode {
            RenameTargetMode::Overwrite => CurrentTarget::Overwrite,
            RenameTargetMode::Create => CurrentTarget::Create,
        };
        let options = current::RenameOptions { target_mode, extensions: options.extensions };
        self.0.rename_opts(&to_current(from)?, &to_current(to)?, options).await.map_err(error)
    }
}

/// An upload in parts.
#[derive(Debug)]
struct Upload(Box<dyn current::MultipartUpload>);

#[async_trait]
impl MultipartUpload for Upload {
    fn put_part(&mut self, contents: PutPayload) -> UploadPart {
        Box::pin(self.0.put_part(payload(contents)).map_err(error))
    }

    async fn complete(&mut self) -> Result<PutResult> {
        self.0.complete().await.map(put_result).map_err(error)
    }

    async fn abort(&mut self) -> Result<()> {
        self.0.abort().await.map_err(error)
    }
}
