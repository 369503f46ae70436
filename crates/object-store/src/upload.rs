//! Uploads in parts. The parts of a [`PartsUpload`] come in order: each is written at its place in
//! one content object. Those of an [`Upload`] come in any order: each is a content object.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use draconis_types::lock::Mutex;
use object_store::path::Path;
use object_store::{
    Attributes, MultipartId, MultipartUpload, PutMode, PutPayload, PutResult, Result, UploadPart,
};

use crate::blocking::run_blocking;
use crate::catalog::Catalog;
use crate::error::{generic, with_path};
use crate::staging::Staging;

/// An upload whose parts come in order.
#[derive(Debug)]
pub(crate) struct PartsUpload {
    path: Path,
    attributes: Attributes,
    staging: Arc<Staging>,
    len: u64,
    parts: u64,
    written_parts: Arc<AtomicU64>,
}

impl PartsUpload {
    pub fn create(
        catalog: &Arc<Catalog>,
        path: Path,
        attributes: Attributes,
    ) -> Result<Box<dyn MultipartUpload>> {
        let staging = Staging::create(catalog).map_err(|error| with_path(&path, error))?;
        let written_parts = Arc::default();
        Ok(Box::new(Self { path, attributes, staging, len: 0, parts: 0, written_parts }))
    }
}

#[async_trait]
impl MultipartUpload for PartsUpload {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        let at = self.len;
        self.len = self.len.saturating_add(data.content_length() as u64);
        self.parts = self.parts.saturating_add(1);
        let (staging, path, written) =
            (self.staging.clone(), self.path.clone(), self.written_parts.clone());
        Box::pin(run_blocking(move || {
            staging.write(at, &data).map_err(|error| with_path(&path, error))?;
            written.fetch_add(1, Ordering::AcqRel);
            Ok(())
        }))
    }

    async fn complete(&mut self) -> Result<PutResult> {
        let written = self.written_parts.load(Ordering::Acquire);
        if written != self.parts {
            let (path, parts) = (&self.path, self.parts);
            return Err(generic(format!("{path}: {written} of {parts} parts were written")));
        }
        let (staging, path, len) = (self.staging.clone(), self.path.clone(), self.len);
        let attributes = self.attributes.clone();
        run_blocking(move || staging.publish(&path, &PutMode::Overwrite, len, attributes)).await
    }

    async fn abort(&mut self) -> Result<()> {
        let (staging, path) = (self.staging.clone(), self.path.clone());
        run_blocking(move || staging.discard().map_err(|error| with_path(&path, error))).await
    }
}

/// Uploads by id, of this opening of the store.
pub(crate) type Uploads = Mutex<HashMap<MultipartId, Upload>>;

/// An upload whose parts come in any order.
#[derive(Debug)]
pub(crate) struct Upload {
    pub attributes: Attributes,
    /// Contents and lengths of the parts, by their indices.
    pub parts: BTreeMap<usize, (Arc<Staging>, u64)>,
}
