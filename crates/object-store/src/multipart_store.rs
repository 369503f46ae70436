//! Uploads by id, whose parts come in any order and without their places: completing an upload
//! appends the other parts to the first. An upload does not outlive the opening of its store.

use std::collections::BTreeMap;

use async_trait::async_trait;
use object_store::multipart::{MultipartStore, PartId};
use object_store::path::Path;
use object_store::{MultipartId, PutMode, PutMultipartOptions, PutPayload, PutResult, Result};

use crate::error::{generic, with_path};
use crate::staging::{self, Staging};
use crate::store::DraconisStore;
use crate::upload::Upload;

fn no_upload(path: &Path, id: &MultipartId) -> object_store::Error {
    generic(format!("{path}: there is no upload {id}"))
}

#[async_trait]
impl MultipartStore for DraconisStore {
    async fn create_multipart(&self, path: &Path) -> Result<MultipartId> {
        self.create_multipart_opts(path, PutMultipartOptions::default()).await
    }

    async fn create_multipart_opts(
        &self,
        _path: &Path,
        opts: PutMultipartOptions,
    ) -> Result<MultipartId> {
        let uploads = self.uploads.clone();
        self.run(move |catalog| {
            let id = catalog.next_version().to_e_tag().replace('"', "");
            let upload = Upload { attributes: opts.attributes, parts: BTreeMap::new() };
            uploads.lock().insert(id.clone(), upload);
            Ok(id)
        })
        .await
    }

    async fn put_part(
        &self,
        path: &Path,
        id: &MultipartId,
        part_idx: usize,
        data: PutPayload,
    ) -> Result<PartId> {
        let (path, id, uploads) = (path.clone(), id.clone(), self.uploads.clone());
        self.run(move |catalog| {
            let staging = Staging::create(&catalog).map_err(|error| with_path(&path, error))?;
            staging.write(0, &data).map_err(|error| with_path(&path, error))?;
            let content_id = staging.content.to_string();
            let mut uploads = uploads.lock();
            let upload = uploads.get_mut(&id).ok_or_else(|| no_upload(&path, &id))?;
            upload.parts.insert(part_idx, (staging, data.content_length() as u64));
            Ok(PartId { content_id })
        })
        .await
    }

    async fn complete_multipart(
        &self,
        path: &Path,
        id: &MultipartId,
        parts: Vec<PartId>,
    ) -> Result<PutResult> {
        let (path, id, uploads) = (path.clone(), id.clone(), self.uploads.clone());
        self.run(move |catalog| {
            let (attributes, stored) = {
                let uploads = uploads.lock();
                let upload = uploads.get(&id).ok_or_else(|| no_upload(&path, &id))?;
                (upload.attributes.clone(), upload.parts.clone())
            };
            let mut found = vec![];
            for (nth, part) in parts.iter().enumerate() {
                match stored.get(&nth) {
                    Some(there) if there.0.content.to_string() == part.content_id => {
                        found.push(there.clone());
                    }
                    _ => return Err(generic(format!("{path}: part {nth} was not uploaded"))),
                }
            }
            let overwrite = PutMode::Overwrite;
            let mut found = found.into_iter();
            let done = match found.next() {
                None => staging::put(&catalog, &path, &PutPayload::new(), &overwrite, attributes)?,
                Some((first, mut len)) => {
                    for (part, part_len) in found {
                        let copied = first.write_copy(len, &part, part_len);
                        copied.map_err(|error| with_path(&path, error))?;
                        len = len.saturating_add(part_len);
                    }
                    first.publish(&path, &overwrite, len, attributes)?
                }
            };
            uploads.lock().remove(&id);
            Ok(done)
        })
        .await
    }

    async fn abort_multipart(&self, path: &Path, id: &MultipartId) -> Result<()> {
        let (path, id, uploads) = (path.clone(), id.clone(), self.uploads.clone());
        self.run(move |_| {
            let upload = uploads.lock().remove(&id);
            let upload = upload.ok_or_else(|| no_upload(&path, &id))?;
            for (part, _) in upload.parts.into_values() {
                part.discard().map_err(|error| with_path(&path, error))?;
            }
            Ok(())
        })
        .await
    }
}
