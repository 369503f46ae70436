//! Container images of one layer: an OCI layout in a tar archive.
//!
//! ```text
//!   | header, written last | layer, summed on the way | configuration | manifest | index | layout |
//! ```
//! Law: equal volumes give equal bytes, without time stamps or user names.

use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};
use std::path::Path;

use anyhow::{Context, ensure};
use draconis_access::populate::{BlobDigest, ImagePlatform, OCI_REF_NAME_ANNOTATION};
use draconis_types::path_bytes::ShowPath;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tar::{EntryType, Header};

const BLOCK_BYTES: u64 = 512;
/// Maximum length of a configuration, in bytes; the limit of registries.
const MAX_JSON_BYTES: u64 = 4 << 20;

/// A layer being written; space for its header precedes it.
pub struct OciImageWriter {
    file: File,
    sum: Sha256,
    len: u64,
}

/// Metadata of an image.
pub struct ImageMetadata {
    pub platform: Option<ImagePlatform>,
    /// Configuration, whose list of layers is replaced.
    pub config: Option<Value>,
    pub tag: Option<String>,
}

impl ImageMetadata {
    /// Reads the configuration.
    pub fn new(
        platform: Option<ImagePlatform>,
        config: Option<&Path>,
        tag: Option<String>,
    ) -> anyhow::Result<Self> {
        let read = |path: &Path| -> anyhow::Result<Value> {
            ensure!(path.metadata()?.len() <= MAX_JSON_BYTES, "too long for a configuration");
            let value: Value = serde_json::from_slice(&std::fs::read(path)?)?;
            ensure!(value.is_object(), "not the configuration of an image");
            Ok(value)
        };
        let config = config.map(|path| read(path).with_context(|| path.shown().to_string()));
        Ok(Self { platform, config: config.transpose()?, tag })
    }
}

impl OciImageWriter {
    /// Begins an image in a file.
    pub fn begin_image(mut file: File) -> io::Result<Self> {
        file.write_all(&[0; BLOCK_BYTES as usize])?;
        Ok(Self { file, sum: Sha256::new(), len: 0 })
    }

    /// Ends the layer, and writes configuration, manifest and index.
    pub fn finish_image(mut self, about: ImageMetadata) -> anyhow::Result<()> {
        pad_to_block(&mut self.file, self.len)?;
        let layer = BlobDigest::from_bytes(self.sum.finalize().into());
        let config = image_config(about.config, about.platform, &layer);
        let descriptor = |kind: &str, digest: &BlobDigest, len: u64| {
            json!({
                "mediaType": format!("application/vnd.oci.image.{kind}"),
                "digest": digest.to_string(),
                "size": len,
            })
        };
        let layers = [descriptor("layer.v1.tar", &layer, self.len)];
        let mut put = |kind: &str, value: &Value| -> anyhow::Result<Value> {
            let bytes = serde_json::to_vec(value)?;
            let digest = BlobDigest::of_bytes(&bytes);
            write_member(&mut self.file, &digest.blob_path(), &bytes)?;
            Ok(descriptor(kind, &digest, bytes.len() as u64))
        };
        let config = put("config.v1+json", &config)?;
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": config,
            "layers": layers,
        });
        let mut manifest = put("manifest.v1+json", &manifest)?;
        if let Some(tag) = about.tag {
            manifest["annotations"] = json!({ OCI_REF_NAME_ANNOTATION: tag });
        }
        let index = json!({ "schemaVersion": 2, "manifests": [manifest] });
        write_member(&mut self.file, "index.json", &serde_json::to_vec(&index)?)?;
        let layout = json!({ "imageLayoutVersion": "1.0.0" });
        write_member(&mut self.file, "oci-layout", &serde_json::to_vec(&layout)?)?;
        self.file.write_all(&[0; 2 * BLOCK_BYTES as usize])?;
        self.file.seek(SeekFrom::Start(0))?;
        self.file.write_all(tar_header(&layer.blob_path(), self.len)?.as_bytes())?;
        Ok(())
    }
}

impl Write for OciImageWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write(bytes)?;
        self.sum.update(bytes.get(..written).unwrap_or_default());
        self.len += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Returns a configuration with one layer.
fn image_config(
    config: Option<Value>,
    platform: Option<ImagePlatform>,
    layer: &BlobDigest,
) -> Value {
    let fresh = config.is_none();
    let mut config = config.unwrap_or_else(|| json!({}));
    if let Some(platform) = platform.or_else(|| fresh.then(ImagePlatform::host)) {
        config["os"] = platform.os().into();
        config["architecture"] = platform.architecture().into();
        if let Some(fields) = config.as_object_mut() {
            fields.remove("variant");
        }
        if let Some(variant) = platform.variant() {
            config["variant"] = variant.into();
        }
    }
    config["rootfs"] = json!({ "type": "layers", "diff_ids": [layer.to_string()] });
    if let Some(fields) = config.as_object_mut() {
        // The history refers to the former layers.
        fields.remove("history");
    }
    config
}

fn write_member(file: &mut File, name: &str, bytes: &[u8]) -> anyhow::Result<()> {
    file.write_all(tar_header(name, bytes.len() as u64)?.as_bytes())?;
    file.write_all(bytes)?;
    pad_to_block(file, bytes.len() as u64)
}

fn tar_header(name: &str, len: u64) -> anyhow::Result<Header> {
    let mut header = Header::new_ustar();
    header.set_path(name)?;
    header.set_entry_type(EntryType::Regular);
    header.set_mode(0o644);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header.set_size(len);
    header.set_cksum();
    Ok(header)
}

fn pad_to_block(file: &mut File, len: u64) -> anyhow::Result<()> {
    let over = (len.next_multiple_of(BLOCK_BYTES) - len) as usize;
    Ok(file.write_all(&vec![0; over])?)
}
